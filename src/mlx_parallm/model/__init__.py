"""The one base model: finding it, loading it, its tokenizer, and what the engine must know of its layers."""

import os

# Transformers says on import that PyTorch is missing; we use only its tokenizers.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
