"""The English word forms and spelled numbers that the built-in corpus needs."""

_ONES = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen"""
_TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety"


def cardinal(value: int) -> str:
    """Spells 0 to 999,999: twenty-five, three thousand five hundred. Raises ValueError beyond that."""
    if not 0 <= value < 1_000_000:
        raise ValueError(f"English numbers are spelled from 0 to 999,999, got {value}")
    for size, name in ((1000, "thousand"), (100, "hundred")):
        count, rest = divmod(value, size)
        if count:
            return f"{cardinal(count)} {name}" + (f" {cardinal(rest)}" if rest else "")
    if value < 20:
        return _ONES.split()[value]
    tens, ones = divmod(value, 10)
    return _TENS.split()[tens] + (f"-{_ONES.split()[ones]}" if ones else "")


def ordinal(value: int) -> str:
    """Returns 1st, 2nd, 3rd, 4th, 11th, 21st."""
    is_teen = value % 100 in (11, 12, 13)
    return f"{value}" + ("th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th"))


_IRREGULAR = """
    be=was become=became bring=brought buy=bought do=did draw=drew drink=drank eat=ate find=found get=got
    give=gave go=went have=had know=knew leave=left lose=lost make=made meet=met read=read ride=rode
    run=ran sell=sold sing=sang sleep=slept speak=spoke swim=swam take=took teach=taught write=wrote"""
_PAST_FORMS = dict(pair.split("=") for pair in _IRREGULAR.split())
_DOUBLING = ("get", "plan", "run", "swim")


def third_person(verb: str) -> str:
    """Returns the form after he or she: reads, watches, studies, has."""
    if verb == "have":
        return "has"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "o")) else "s")


def past(verb: str) -> str:
    """Returns the past form: read, watched, studied, planned."""
    if verb in _PAST_FORMS:
        return _PAST_FORMS[verb]
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + (verb[-1] if verb in _DOUBLING else "") + ("d" if verb.endswith("e") else "ed")


def progressive(verb: str) -> str:
    """Returns the -ing form: reading, making, running."""
    if verb.endswith("e") and not verb.endswith("ee") and verb != "be":
        return verb[:-1] + "ing"
    return verb + (verb[-1] if verb in _DOUBLING else "") + "ing"


def plural(noun: str) -> str:
    """Returns the plural: books, boxes, puppies, knives, sheep."""
    irregular = {"knife": "knives", "sheep": "sheep"}
    if noun in irregular:
        return irregular[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "sh", "ch", "x")) else "s")


def comparative(adjective: str) -> str:
    """Returns bigger, heavier, more expensive, better."""
    if adjective == "good":
        return "better"
    if adjective.endswith("y"):
        return adjective[:-1] + "ier"
    if len(adjective) > 6:
        return f"more {adjective}"
    if adjective.endswith("e"):
        return adjective + "r"
    doubled = adjective[-1] in "bdgt" and adjective[-2] in "aeiou" and adjective[-3] not in "aeiou"
    return adjective + (adjective[-1] if doubled else "") + "er"
