"""The standard interfaces on one VecEnv: Gymnasium, PettingZoo (one environment, AEC, batched), NumPy, rendering."""
