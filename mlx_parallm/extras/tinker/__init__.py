"""The Tinker API: programs that train adapters with calls of their own, such as `forward_backward`."""
