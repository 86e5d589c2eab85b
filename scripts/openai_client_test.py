"""What the OpenAI client for Python sees of a dispatcher with the real model.

usage: openai_client_test.py DISPATCHER MODEL
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import openai

KEY = "key-of-the-client-test"
START_S = 120
# Equal text is promised only where a row steps alone and computes its prompt the same way each time.
ALONE = {"cache_prompt": False, "batch_invariant": True}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def await_ready(server, port):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"the dispatcher ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise SystemExit(f"the dispatcher was not ready within {START_S} s")


def question(text):
    return [{"role": "user", "content": text}]


def models_are_listed(client, name):
    assert name in [model.id for model in client.models.list()]
    assert client.models.retrieve(name).id == name


def a_chat_is_answered_whole(client, name):
    answer = client.chat.completions.create(
        model=name, messages=question("Repeat this number and nothing else: 3684"), max_tokens=24, temperature=0
    )
    (choice,) = answer.choices
    assert "3684" in choice.message.content, choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    timings = answer.model_extra["timings"]
    assert timings["attempts"] == 1 and timings["ttft_ms"] > 0, timings


def a_stream_is_the_same_text_with_one_end(client, name):
    ask = dict(
        model=name, messages=question("Name three fruits."), max_tokens=32, temperature=0, extra_body=ALONE
    )
    whole = client.chat.completions.create(**ask).choices[0]
    chunks = list(client.chat.completions.create(**ask, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.message.content, (text, whole.message.content)
    ends = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert ends == [whole.finish_reason], ends
    assert all(chunk.usage is None for chunk in chunks), "usage without having been asked for"


def usage_comes_once_and_last_where_it_is_asked_for(client, name):
    chunks = list(
        client.chat.completions.create(
            model=name,
            messages=question("Say hello."),
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    counted = [chunk for chunk in chunks if chunk.usage is not None]
    assert counted == [chunks[-1]] and chunks[-1].choices == []
    assert 0 < chunks[-1].usage.completion_tokens <= 8


def a_completion_goes_on_with_a_text(client, name):
    ask = dict(model=name, prompt="The sky is", max_tokens=8, temperature=0, extra_body=ALONE)
    whole = client.completions.create(**ask)
    assert whole.choices[0].text and whole.usage.completion_tokens <= 8
    streamed = "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True) if c.choices)
    assert streamed == whole.choices[0].text, (streamed, whole.choices[0].text)


def a_stop_string_is_never_sent(client, name):
    ask = dict(model=name, messages=question("Count from one to ten."), max_tokens=48, temperature=0)
    ask["extra_body"] = ALONE
    free = client.chat.completions.create(**ask).choices[0].message.content
    # Any piece from the middle will do: it is in the text, so it must end the text.
    piece = free[len(free) // 3 : len(free) // 3 + 3]
    stopped = client.chat.completions.create(**ask, stop=[piece]).choices[0]
    assert stopped.finish_reason == "stop", stopped
    assert stopped.message.content == free[: free.index(piece)], (stopped, free, piece)


def a_seed_repeats_a_sampled_answer(client, name):
    def ask(seed):
        return client.chat.completions.create(
            model=name,
            messages=question("Invent a name for a boat."),
            max_tokens=16,
            temperature=1.5,
            seed=seed,
            extra_body=ALONE,
        ).choices[0].message.content

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1, "the seed changes nothing"


def logprobs_are_reported(client, name):
    answer = client.chat.completions.create(
        model=name, messages=question("Hi"), max_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    for token in answer.choices[0].logprobs.content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def mistakes_have_their_own_exceptions(client, name):
    def refused(kind, status, **changes):
        ask = dict(model=name, messages=question("Hi"), max_tokens=4) | changes
        try:
            client.chat.completions.create(**ask)
        except kind as error:
            assert error.status_code == status, error
            return error
        raise AssertionError(f"{changes} was taken")

    assert refused(openai.NotFoundError, 404, model="another").code == "model_not_found"
    refused(openai.BadRequestError, 400, temperature=-1)
    refused(openai.BadRequestError, 400, messages=[])
    error = refused(openai.BadRequestError, 400, messages=question("word " * 5000))
    assert error.code == "context_length_exceeded", error
    stranger = client.with_options(api_key="another")
    try:
        stranger.models.list()
    except openai.AuthenticationError as error:
        assert error.status_code == 401
    else:
        raise AssertionError("a wrong key was let in")


CHECKS = [
    models_are_listed,
    a_chat_is_answered_whole,
    a_stream_is_the_same_text_with_one_end,
    usage_comes_once_and_last_where_it_is_asked_for,
    a_completion_goes_on_with_a_text,
    a_stop_string_is_never_sent,
    a_seed_repeats_a_sampled_answer,
    logprobs_are_reported,
    mistakes_have_their_own_exceptions,
]


def main():
    program, model = sys.argv[1:]
    name = pathlib.Path(model).stem
    port = free_port()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="dsp", dir="/tmp") as scratch:
        log = open(f"{scratch}/log", "w+")
        settings = ["--instances", "2", "--slots", "2", "--threads", "1", "--ctx-size", "1024"]
        server = subprocess.Popen(
            [program, "--model", model, "--port", str(port), "--run-dir", f"{scratch}/run", *settings],
            env=os.environ | {"DISPATCHER_API_KEY": KEY},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            await_ready(server, port)
            client = openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=120
            )
            for check in CHECKS:
                try:
                    check(client, name)
                    print(f"ok      {check.__name__}")
                except Exception as error:  # noqa: BLE001 - every failure is reported, then all count
                    failed += 1
                    print(f"FAILED  {check.__name__}: {type(error).__name__}: {error}")
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=60)
            if code != 0:
                failed += 1
                print(f"FAILED  SIGTERM ends with exit code {code}, not 0")
        finally:
            if server.poll() is None:
                server.kill()
                server.wait()
            if failed or sys.exc_info()[0]:
                log.flush()
                log.seek(0)
                print("---- the dispatcher's log ----\n" + log.read()[-20000:], file=sys.stderr)
            log.close()
    print(f"{len(CHECKS)} checks of the OpenAI client, {failed} failed")
    sys.exit(1 if failed else 0)


main()
