"""Letters: only those of this run get through, in any quantity of others, and nothing breaks."""

from __future__ import annotations

import random
import struct
import threading
import time
from typing import Any

import pytest
import zmq

from lightning_sync.comm.mail import Box, Letter, LetterError, Lines, Run, new_secret, own_address
from tests.asynchronous.world import Rank, run, whole, world


def a_run(**changes: Any) -> Run:
    fields: dict[str, Any] = {"secret": new_secret(), "number": 7, "model": 9, "ranks": 3, "largest": 1000}
    return Run(**{**fields, **changes})


def test_a_letter_comes_back_as_it_was_sent() -> None:
    run = a_run()
    letter = Letter(3, 2, 2**60, (1, -2, 3, 2**62), (0.5, -1e300), b"abc")
    assert run.unpack([run.pack(letter), b"abc"]) == letter


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"number": 8}, "another run"),
        ({"model": 8}, "another model"),
        ({"ranks": 2}, "malformed"),
        ({"largest": 2}, "malformed"),
    ],
)
def test_letters_of_another_run_model_or_size_are_told_apart(change: dict[str, int], reason: str) -> None:
    ours = a_run()
    header = ours.pack(Letter(1, 2, 1, body=b"abc"))
    with pytest.raises(LetterError, match=reason):
        a_run(secret=ours.secret, **change).unpack([header, b"abc"])


def test_the_secret_is_not_in_what_a_run_prints() -> None:
    run = a_run()
    assert run.secret.decode() not in repr(run)
    assert run.secret.decode() not in f"{Letter(1, 0, 0)} {run}"


def test_the_own_address_towards_this_machine_is_the_loopback() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"


def serve(box: Box, until: threading.Event) -> None:
    while not until.is_set():
        for back, letter in box.receive(0.05):
            box.answer(back, Letter(200, 0, letter.request, body=b"yes"))


def knock(box: Box, run: Run, seconds: float = 0.7) -> list[bytes]:
    """What a stranger gets who thinks that the run is `run`."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.linger = 0
        line.curve_serverkey = zmq.curve_public(run.secret)
        line.curve_publickey, line.curve_secretkey = zmq.curve_keypair() if run.ranks == 1 else (
            zmq.curve_public(run.secret), run.secret)  # fmt: skip
        line.connect(box.endpoint)
        line.send_multipart([run.pack(Letter(1, 0, 1)), b""])
        return line.recv_multipart() if line.poll(round(seconds * 1000)) else []


def test_a_stranger_without_the_key_gets_no_answer_and_is_counted() -> None:
    run = a_run()
    box, over = Box(run, "127.0.0.1"), threading.Event()
    thread = threading.Thread(target=serve, args=(box, over), daemon=True)
    thread.start()
    try:
        assert knock(box, run) != [], "who has the key is answered"
        assert knock(box, a_run()) == [], "another key pair"
        assert knock(box, Run(run.secret, 7, 9, 1, 1000)) == [], "the box's public key, but a key pair of its own"
        with zmq.Context() as context, context.socket(zmq.DEALER) as line:
            line.linger = 0
            line.connect(box.endpoint)  # without encryption
            line.send_multipart([run.pack(Letter(1, 0, 1)), b""])
            assert not line.poll(500)
        assert knock(box, run) != [], "and those who have it still are"
    finally:
        over.set()
        thread.join()
        box.close()
    assert box.rejected["without the key"] >= 2


def mutated(run: Run, dice: random.Random, length: int) -> list[bytes]:
    """Something like a letter."""
    body = dice.randbytes(dice.choice([0, 1, length, length, length + 1]))
    numbers = tuple(dice.choice([-(2**63), -2, -1, 0, 1, 5, 2**40, 2**63 - 1]) for _ in range(4))
    reals = (dice.choice([float("nan"), float("inf"), -1.0, 1.0]), dice.choice([float("nan"), -1.0, 1e300, 1.0]))
    letter = Letter(dice.choice([0, 1, 2, 3, 16, 255]), dice.randrange(6), dice.getrandbits(64), numbers, reals, body)  # type: ignore[arg-type]
    frames = [run.pack(letter), body]
    kind = dice.randrange(5)
    if kind == 0:
        header = bytearray(frames[0])
        header[dice.randrange(len(header))] ^= 1 << dice.randrange(8)
        frames[0] = bytes(header)
    elif kind == 1:
        frames[0] = frames[0][: dice.randrange(len(frames[0]))]
    elif kind == 2:
        frames = [dice.randbytes(dice.randrange(200)) for _ in range(dice.randrange(1, 5))]
    elif kind == 3:
        frames[0] = struct.pack("<4sBB", b"LSYN", 1, 1) + dice.randbytes(len(frames[0]) - 6)
    return frames


def test_ten_thousand_random_and_mutated_letters_with_the_key_change_nothing_and_training_goes_on() -> None:
    """From somebody inside, who has the key, while three ranks train."""
    ranks = world(3, bound=2)
    real = ranks[0].engine._run
    # Ranks that do not exist, so that a letter which is sound by chance cannot stand in for a real one.
    outside = Run(real.secret, real.number, real.model, 2**32, real.largest)
    length = 4 * (ranks[0].engine.layout.slices[0][1])
    sent = threading.Event()

    def attack() -> None:
        dice = random.Random(5)
        with zmq.Context() as context, context.socket(zmq.DEALER) as line:
            line.linger = 2000
            line.curve_serverkey = line.curve_publickey = zmq.curve_public(real.secret)
            line.curve_secretkey = real.secret
            line.connect(ranks[0].endpoint)
            for _ in range(10_000):
                frames = mutated(outside, dice, length)
                # Real ranks are 0 to 2; what would be a sound letter of theirs is tested as a repetition below.
                if len(frames) == 2 and len(frames[0]) == len(real.pack(Letter(1, 0, 0))) and sound(real, frames):
                    continue
                line.send_multipart(frames)
            sent.set()
            time.sleep(0.5)

    def sound(run: Run, frames: list[bytes]) -> bool:
        try:
            letter = run.unpack(frames)
        except LetterError:
            return False
        return ranks[0].engine.owner._fault(letter) is None

    attacker = threading.Thread(target=attack, daemon=True)
    attacker.start()

    def body(rank: Rank) -> Any:
        import torch

        generator = torch.Generator().manual_seed(rank.rank)
        total, steps = torch.zeros(rank.flat.numel()), 0
        while steps < 30 or not sent.is_set():
            change = whole(generator)
            total += torch.cat([c.reshape(-1) for c in change])
            rank.step(change)
            steps += 1
            time.sleep(0.005)
        time.sleep(0.3)
        rank.engine.meet()
        return total, rank.engine.replica.fetched.clone()

    results = run(ranks, body, 120)
    attacker.join(10)
    expected = -sum(total for total, _ in results)
    for _, held in results:
        assert bool((held == expected).all())
    rejected = ranks[0].engine.owner.rejected
    assert sum(rejected.values()) > 9_000, rejected
    assert not any(rank.errors for rank in ranks)


def test_a_letter_that_comes_twice_is_answered_twice_and_counts_once() -> None:
    (rank,) = world(1)
    owner, taken = rank.engine.owner, []

    def body(rank: Rank) -> None:
        original = Lines._send

        def twice(lines: Lines, to: int, letter: Letter) -> None:
            original(lines, to, letter)
            original(lines, to, letter)

        Lines._send = twice  # type: ignore[method-assign]
        try:
            for _ in range(5):
                rank.step([p * 0 + 1.0 for p in rank.params])
                rank.engine._wait()
        finally:
            Lines._send = original  # type: ignore[method-assign]
        rank.engine.meet()
        taken.append(owner.shard.ledger.taken)

    run([rank], body)
    assert taken == [5]
    assert bool((rank.flat == -5).all())


def test_an_old_letter_that_is_played_again_is_refused() -> None:
    ranks = world(2)
    owner = ranks[0].engine.owner

    def body(rank: Rank) -> None:
        for _ in range(3):
            rank.step([p * 0 + 1.0 for p in rank.params])
        rank.engine.meet()

    run(ranks, body)
    request, answer = owner._answered[1]
    old = Letter(1, 1, request - 1, (0, 0, 0, 0), (1.0, 1.0), b"\0" * (4 * owner.shard.values.numel()))
    before = owner.shard.values.clone()
    owner._take(b"nobody", old)
    assert owner.rejected["replayed"] == 1
    assert bool((owner.shard.values == before).all())
    assert owner._answered[1] == (request, answer)
