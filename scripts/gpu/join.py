#!/usr/bin/env python3
"""A long prompt joins running streams: how long do they wait for a token?

usage: join.py URL STREAMS PROMPT_TOKENS

One JSON object a line. Times are seconds on this process's clock."""
import http.client
import json
import sys
import threading
import time
import urllib.parse

url = urllib.parse.urlparse(sys.argv[1])
streams, tokens = int(sys.argv[2]), int(sys.argv[3])


def stream(prompt, max_tokens, seen):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        seen["error"] = f"{response.status} {response.read()[:300]!r}"
        return
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("choices"):
            seen["at"].append(time.monotonic())
        if event.get("usage"):
            seen["usage"] = event["usage"]
        if event.get("error"):
            seen["error"] = event["error"]


def begin(prompt, max_tokens):
    seen = {"at": []}
    thread = threading.Thread(target=stream, args=(prompt, max_tokens, seen))
    thread.start()
    return thread, seen


# Long enough to run before, while and after the prompt joins.
running = [begin(f"Number {n}: tell a story.", 400 + tokens // 50) for n in range(streams)]
while not all(len(seen["at"]) > 100 for _, seen in running):
    if any("error" in seen for _, seen in running):
        sys.exit(str([seen.get("error") for _, seen in running]))
    time.sleep(0.01)
joined = time.monotonic()
thread, long = begin(" hello" * tokens, 8)
thread.join()
for thread, _ in running:
    thread.join()
if not long["at"]:
    sys.exit(str(long.get("error")))
first = long["at"][0]


def gaps(low, high):
    found = []
    for _, seen in running:
        at = seen["at"]
        found += [b - a for a, b in zip(at, at[1:]) if b > low and a < high]
    return sorted(found)


alone, beside = gaps(0, joined), gaps(joined, first)
print(json.dumps({
    "prompt_tokens": long.get("usage", {}).get("prompt_tokens"),
    "streams": streams,
    "ttft_s": round(first - joined, 3),
    "gap_alone_median_ms": round(1e3 * alone[len(alone) // 2], 2),
    "gap_beside_median_ms": round(1e3 * beside[len(beside) // 2], 2),
    "gap_beside_max_ms": round(1e3 * beside[-1], 2),
    "tokens_beside": len(beside),
    "streams_ended_before_the_prompt": sum(seen["at"][-1] < first for _, seen in running),
}))
