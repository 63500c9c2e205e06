"""Averages: weighted means of adapters, published as adapters."""
