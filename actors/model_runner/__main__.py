"""The model_runner's process."""

from __future__ import annotations

from radixcast.actors.model_runner.threads import configure_threads

configure_threads()  # before anything imports torch: OpenMP reads its settings once

from radixcast.actors.host import main  # noqa: E402
from radixcast.actors.model_runner.actor import ModelRunnerActor  # noqa: E402

if __name__ == "__main__":
    main(ModelRunnerActor)
