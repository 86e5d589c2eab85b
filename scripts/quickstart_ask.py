"""The quickstart's client: finds a port, waits for readiness, asks, and shows where the time went.

usage: quickstart_ask.py port PREFERRED | wait URL PID | ask URL
"""

import json
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

READY_S = 180
ANSWER_S = 300
QUESTIONS = [
    "In two sentences: why is the sky blue?",
    "In two sentences: why is the sea salty?",
]


def port(preferred):
    """The preferred port where it is free, else any free one."""
    for wanted in (int(preferred), 0):
        with socket.socket() as probe:
            # As the dispatcher will bind it: a connection that just ended does not hold a port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            print(probe.getsockname()[1])
            return 0
    return 1


def wait(url, pid):
    """Until the server is ready; not longer than its process lives."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return 0
        except (urllib.error.URLError, OSError):
            pass
        try:
            os.kill(int(pid), 0)
        except OSError:
            print("the dispatcher ended before it was ready", file=sys.stderr)
            return 1
        time.sleep(0.1)
    print(f"the dispatcher was not ready within {READY_S} s", file=sys.stderr)
    return 1


def stream(url, question, show):
    """Asks, hands each piece of text to `show`, and returns timings and usage."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 80,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    result, text, done = {}, "", False
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        for line in response:
            line = line.decode().strip()
            if not line.startswith("data:"):
                continue
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                done = True
                break
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"].get("message", event["error"]))
            for choice in event.get("choices", []):
                piece = choice.get("delta", {}).get("content") or ""
                text += piece
                show(piece)
            for key in ("timings", "usage"):
                if event.get(key):
                    result[key] = event[key]
    if not (done and text and "timings" in result and "usage" in result):
        raise RuntimeError("the stream ended without an answer")
    return result


def row(result):
    timings, tokens = result["timings"], result["usage"]["completion_tokens"]
    gaps = max(tokens - 1, 1)
    decode_ms = timings["decode_ms"] or 0.0
    return [
        str(timings["instance"]),
        f"{timings['queue_ms']:.1f}",
        f"{timings['ttft_ms']:.0f}",
        f"{decode_ms / gaps:.1f}" if tokens > 1 else "-",
        f"{tokens}",
        f"{1000 * gaps / decode_ms:.1f}" if decode_ms and tokens > 1 else "-",
    ]


def ask(url):
    """Two questions at once, so that both instances work; the first one's answer is shown."""
    results, errors = {}, []

    def one(index, show):
        try:
            results[index] = stream(url, QUESTIONS[index], show)
        except (urllib.error.URLError, OSError, RuntimeError, ValueError) as error:
            errors.append(f"{QUESTIONS[index]}: {error}")

    def print_now(piece):
        sys.stdout.write(piece)
        sys.stdout.flush()

    second = threading.Thread(target=one, args=(1, lambda piece: None))
    print(f"\n> {QUESTIONS[0]}\n")
    second.start()
    one(0, print_now)
    second.join()
    print("\n")
    if errors:
        print("\n".join(errors), file=sys.stderr)
        return 1
    head = ["instance", "queue ms", "TTFT ms", "TPOT ms", "tokens", "tok/s"]
    rows = [head] + [row(results[index]) for index in sorted(results)]
    for cells in rows:
        print("  ".join(cell.rjust(max(len(name), 8)) for cell, name in zip(cells, head)))
    return 0


def main():
    verbs = {"port": port, "wait": wait, "ask": ask}
    if len(sys.argv) < 2 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    sys.exit(verbs[sys.argv[1]](*sys.argv[2:]))


main()
