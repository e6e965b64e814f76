"""Plain torch, one op a file: slow, short, and the definition of right for every other implementation."""
