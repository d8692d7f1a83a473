"""Ways in which files come to harm: on a disk, by a copy, in an editor."""

import json

ODD = [
    None, True, False, 0, -1, 1, 2, 65536, 2**31, 2**63, 10**30, 1.5, float("nan"), 1e308, "", "0",
    "<u2", "<u4", "<f8", "O", "x" * 500, "\n", "\ud800", [], [0], {}, {"a": 1}, [[]] * 3,
]  # fmt: skip
WORDS = [
    "010", "0x10", "0o10", "1_000", "1:30", "1e3", "1e400", "-1", "0", "5.0", "+5", ".5", "5.",
    "-0", ".inf", "-.inf", ".nan", "inf", "nan", "yes", "no", "on", "true", "null", "~", "", "''",
    "'null'", '"5"', "'5'", "2020-01-01", "2020-01-01 10:00:00", "!!int 5", "!!binary aGk=",
    "!!python/name:os.system", "&a 5", "*a", "[1, 2]", "[0.5, 0.5]", "[]", "{}", "{a: 1}", "|",
    "{steps: 5, steps: 6}", ">-", "\t5", "9" * 18, "9" * 400, "9" * 5000, "[" * 3000, "{" * 3000,
    "- " * 2000, "? " * 500, "é", "\U0001f600", "\ufeff", "\u2028", "\x85", "\0", "\x1b[2J", "---",
    "...", "%YAML 1.1", "@", "`", "5 # five", '"\\ud800"', '"a\\nb"', "'it''s'", "a: b",
    "<<: {steps: 5}", "exlm", "mlm", "cpu",
]  # fmt: skip
# Each line holds the one before twice.
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: &d [*c, *c]\ne: [*d, *d]"


def damage_bytes(content, rng):
    """One of the ways a disk, a copy or an editor spoils a file."""
    content = bytearray(content)
    at = rng.randrange(len(content))
    upto = min(len(content), at + rng.randrange(1, 20))
    way = rng.randrange(6)
    if way == 0:
        content[at] ^= 1 << rng.randrange(8)
    elif way == 1:
        content[at:upto] = rng.randbytes(upto - at)
    elif way == 2:
        del content[at:upto]
    elif way == 3:
        del content[at:]
    elif way == 4:
        content[at:at] = content[at:upto]
    else:
        content[at:at] = rng.randbytes(rng.randrange(1, 20))
    return bytes(content)


def damage_json(content, rng):
    """Another value somewhere, a field gone or one more."""
    place, path = content, []
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = rng.choice(keys)
        path.append(key)
        if not isinstance(place[key], dict | list) or rng.random() < 0.3:
            break
        place = place[key]
    if not keys:
        return content
    way = rng.randrange(4)
    if way == 0 and isinstance(place, dict):
        del place[key]
    elif way == 1 and isinstance(place, dict):
        place[rng.choice(["more", "seal", "version", "\n"])] = rng.choice(ODD)
    elif way == 2 and isinstance(place[key], int):
        place[key] += rng.choice([-1, 1, 10**6, 10**18])
    else:
        place[key] = rng.choice(ODD)
    return content


def damage_text(text, rng):
    """What an editor, a merge or a slip of the hand does to a file of settings; bytes."""
    lines = text.splitlines()
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.randrange(9)
    if way == 0:
        return damage_bytes(text.encode(), rng)
    if way == 1:
        del lines[at]
    elif way == 2:
        lines.insert(other, lines[at])
    elif way == 3:
        lines[at], lines[other] = lines[other], lines[at]
    elif way == 4:
        lines[at] = rng.choice([" ", "  ", "\t", "- ", "#", "? ", "? - "]) + lines[at]
    elif way == 5:
        lines[at] = lines[at].strip()
    elif way == 6:
        lines.insert(at, rng.choice([BOMB, *WORDS]))
    else:
        lines[at] = f"{lines[at].partition(':')[0]}: {rng.choice(WORDS)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def damage_log(content, rng):
    """A log after a crash, a copy, an editor."""
    lines = content.splitlines(keepends=True)
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    way = rng.randrange(7)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(other, lines[at])
    elif way == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif way == 3:
        record = damage_json(json.loads(lines[at]), rng)
        lines[at] = json.dumps(record).encode() + b"\n"
    elif way == 4:
        words = [b"NaN", b"1e999", b"-0", b"9" * 5000, b"[" * 5000, b"1, 2", b"\0", b"\xff"]
        words += [b'{"a": 1, "a": 2}', b"Infinity"]
        lines[at] = lines[at][:-2] + b', "more": ' + rng.choice(words) + b"}\n"
    else:
        return damage_bytes(content, rng)
    return b"".join(lines)
