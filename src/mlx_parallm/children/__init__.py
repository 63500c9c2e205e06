"""Child processes of ours: how they are started, and their side of the pipes."""
