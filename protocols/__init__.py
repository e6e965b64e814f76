"""What is said: messages, sampling parameters, server arguments, API types, errors and the wire.

Layer 1: imports the standard library, msgspec and numpy only, and knows nothing of sockets, tensors or tokenizers.
"""
