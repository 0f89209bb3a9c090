"""Everything about other trainers: see README.md in this folder."""
