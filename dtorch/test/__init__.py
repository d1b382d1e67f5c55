"""What users' own tests of distributed code need."""
