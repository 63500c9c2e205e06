"""People: corrections of answers, and feedback on answers that do not wait any more."""
