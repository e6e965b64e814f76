"""The cast: one folder or file an actor, each with the logic it owns beside the thin asyncio shell that runs it."""
