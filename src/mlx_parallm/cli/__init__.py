"""The commands. Importing this room is quick: a command imports the rooms that it needs when it runs."""
