"""Why a version answers as it does: what it consists of, and which of its trajectories pushed an answer most."""
