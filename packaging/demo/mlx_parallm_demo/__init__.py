"""The model file `SmolLM2-135M-Instruct.Q4_1.gguf` lies in this folder."""
