"""Files: trains an adapter on the rows of a file, by imitation (SFT), preferences (DPO) or verdicts (KTO)."""
