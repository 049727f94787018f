"""Standard interfaces to a VecEnv: Gymnasium, PettingZoo (one environment, AEC, batched), NumPy copies, rendering."""
