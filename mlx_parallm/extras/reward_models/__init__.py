"""Reward models: adapters with a head that score answers, and how they are trained."""
