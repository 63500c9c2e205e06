"""`mlx_parallm bench --report FILE`: measures the engine on this machine beside mlx-lm, in minutes, into one JSON file.

sizes           how much is measured, by the kind of the device
comparison      one figure of both sides, and the rounds in which they take turns
ours            decode, prefill and updates of this engine, through the interface that the server uses
mlx_lm          the same by mlx-lm's batch generator and a plain trainer
plain_trainer   a straightforward LoRA trainer with mlx-lm
sections        what is measured: the self-test, decode, prefill, an update
report          the file: the machine, and each section with how it ended
run             runs the sections within the time budget
"""

import mlx_parallm.model  # noqa: F401  # before anything imports mlx-lm
