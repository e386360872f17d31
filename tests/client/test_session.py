"""When a client gives up, and what it makes of answers; time is an argument."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trims_shim import errors
from trims_shim.client.session import Conversation, error_from
from trims_shim.errors import DaemonError, DaemonTimeout, NoSpace, NotServed, TrimsError
from trims_shim.wire.admin import PinImageReply
from trims_shim.wire.codec import Envelope
from trims_shim.wire.messages import ErrorReply, Progress

REPLY = PinImageReply("digest")


def conversation(now_s: float = 0.0, *, number: int = 1) -> Conversation:
    return Conversation(number, now_s, stall_timeout_s=10.0)


def answer(message: object, request_id: int = 1) -> Envelope:
    return Envelope(request_id, b"", message)


def test_a_request_and_its_reply() -> None:
    assert conversation().receive(answer(REPLY), 1.0) is REPLY


class TestStall:
    def test_silence(self) -> None:
        talk = conversation(100.0)
        assert talk.check_stall(104.0) == pytest.approx(6.0)
        assert talk.check_stall(109.9) == pytest.approx(0.1)
        with pytest.raises(DaemonTimeout, match="10 s"):
            talk.check_stall(110.0)

    def test_bytes_extend_the_time(self) -> None:
        talk = conversation()
        for now, done in ((9.0, 0), (18.0, 1), (27.0, 500)):
            assert talk.receive(answer(Progress(done)), now) is None
            assert talk.check_stall(now) == pytest.approx(10.0)

    def test_signs_of_life_without_bytes_do_not(self) -> None:
        talk = conversation()
        talk.receive(answer(Progress(5)), 1.0)
        for now in range(2, 11):
            talk.receive(answer(Progress(5)), float(now))
            talk.receive(answer(Progress(4)), float(now))
        with pytest.raises(DaemonTimeout):
            talk.check_stall(11.0)

    def test_progress_of_another_request_does_not(self) -> None:
        talk = conversation(number=2)
        talk.receive(answer(Progress(5), request_id=1), 9.0)
        assert talk.check_stall(9.0) == pytest.approx(1.0)


@pytest.mark.parametrize("message", [REPLY, ErrorReply("NoSpace", ""), Progress(1)])
@pytest.mark.parametrize("number", [1, 3, -1])
def test_what_answers_another_request(message: object, number: int) -> None:
    talk = conversation(number=2)
    assert talk.receive(answer(message, number), 0.0) is None
    assert talk.receive(answer(REPLY, 2), 1.0) is REPLY


class TestErrors:
    def test_an_error_reply_is_raised(self) -> None:
        talk = conversation()
        with pytest.raises(NoSpace, match="full"):
            talk.receive(answer(ErrorReply("NoSpace", "full")), 1.0)

    def test_an_error_about_a_message_that_could_not_be_read(self) -> None:
        talk = conversation()
        with pytest.raises(errors.MalformedMessage):
            talk.receive(answer(ErrorReply("MalformedMessage", "?"), request_id=0), 1.0)

    def test_no_other_message_may_leave_the_number_out(self) -> None:
        talk = conversation()
        assert talk.receive(answer(REPLY, request_id=0), 1.0) is None
        assert talk.receive(answer(Progress(99), request_id=0), 9.0) is None
        assert talk.check_stall(9.0) == pytest.approx(1.0)

    @pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "NotServed"])
    def test_every_error_has_its_name(self, name: str) -> None:
        error = error_from(ErrorReply(name, "text"))
        assert type(error) is getattr(errors, name)
        assert str(error) == "text"

    @pytest.mark.parametrize(
        "name", ["NewerError", "", "annotations", "__all__", "KeyboardInterrupt", "NotServed"]
    )
    def test_an_unknown_name_is_a_daemon_error(self, name: str) -> None:
        error = error_from(ErrorReply(name, "text"))
        assert type(error) is DaemonError
        assert str(error) == f"{name}: text"
        assert not isinstance(error, NotServed)


ANSWERS = st.one_of(
    st.builds(Progress, st.integers(0, 9)),
    st.just(REPLY),
    st.builds(ErrorReply, st.sampled_from(["NoSpace", "Nonsense"]), st.text(max_size=3)),
)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 3), ANSWERS), max_size=20))
def test_in_any_sequence_of_answers_only_its_own_bytes_give_it_time(
    events: list[tuple[float, int, object]],
) -> None:
    talk = conversation()
    now, end, most = 0.0, 10.0, -1
    for delay, number, message in events:
        now += delay
        try:
            talk.check_stall(now)
        except DaemonTimeout:
            assert now >= end - 1e-9
            return
        assert now < end + 1e-9
        try:
            if talk.receive(answer(message, number), now) is not None:
                assert (number, message) == (1, REPLY)
                return
        except TrimsError:
            assert number in (0, 1)
            assert isinstance(message, ErrorReply)
            return
        if isinstance(message, Progress) and number == 1 and message.done_bytes > most:
            end, most = now + 10.0, message.done_bytes
