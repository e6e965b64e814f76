"""Benchmarks of a served model over HTTP, against any server that speaks OpenAI's API."""
