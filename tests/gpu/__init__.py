"""What only a GPU can show; every test here is marked gpu."""
