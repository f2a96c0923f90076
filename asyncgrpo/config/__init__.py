"""Every setting: its schema, how it is read, checked and explained."""
