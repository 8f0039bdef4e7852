"""State machines whose end is always reached and always seen."""

from __future__ import annotations

import sys
from typing import ClassVar

from hypothesis import settings
from hypothesis.errors import StopTest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


class Machine(RuleBasedStateMachine):
    """What failed first is what is told; whatever happened, the example gives back what it shares with later ones."""

    unseen: ClassVar[list[BaseException]] = []
    """What failed at the end of examples that Hypothesis had broken off: it takes no notice of that."""

    def check_end(self) -> None:
        """What must hold once everything has been dropped. Not called when a rule has failed: what it raised holds
        much of it, and a second failure would hide the first."""
        raise NotImplementedError

    def give_back(self) -> None:
        """Called at the end of every example, whatever happened."""

    def teardown(self) -> None:
        failed = sys.exception()
        try:
            if failed is None or isinstance(failed, StopTest):
                self.check_end()
        except BaseException as error:  # whatever it is, it is looked at later
            if failed is not None:
                self.unseen.append(error)
            raise
        finally:
            self.give_back()


def run(machine: type[Machine], how: settings) -> None:
    """Run the machine as a test, and fail for what Hypothesis has not seen too."""
    machine.unseen.clear()
    run_state_machine_as_test(machine, settings=how)
    if machine.unseen:
        raise machine.unseen[0]
