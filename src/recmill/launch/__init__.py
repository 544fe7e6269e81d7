"""Starting processes. No torch in here."""
