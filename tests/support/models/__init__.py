"""Models for tests, loaded by file. Each does on demand something that a real model may do."""
