"""From finished trajectories to adapter updates. Knows no engine and no HTTP: it meets them in `core`."""
