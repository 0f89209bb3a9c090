"""Other trainers' names and files."""
