"""What a game says of itself: configuration, state fields, roles, spaces and how it is drawn. No torch, no devices."""
