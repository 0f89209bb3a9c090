"""Recognises secrets by their names and by their forms, and hides them. Prefers to hide too much: what is shown cannot be taken back.

The time of each pattern is linear in the length of the text, because hyperparameters may be megabytes. Patterns are text, which ``re`` compiles
at their first use: compiling all of them takes as long as importing several modules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "***"
"""The text that is shown instead of a secret."""
_STARS = re.escape(HIDDEN)

# -- names --------------------------------------------------------------------------------------------------------------------------

_WORDS = frozenset((
    "auth", "authorization", "bearer", "cookie", "cookies", "cred", "creds", "csrf", "cvv", "dsn", "jwt", "mfa", "nonce",
    "oauth", "otp", "pass", "passin", "passout", "pat", "pem", "pin", "psk", "pw", "pwd", "salt", "sas", "sig",
    "signature", "totp", "tokens", "xsrf"
))  # fmt: skip
"""Words that make a name secret."""
_ENDINGS = ("key", "pass", "passwd", "pswd", "pwd", "secret", "token")
"""Endings of such words, as in ``dbpass``."""
_OTHER_ENDINGS = frozenset((
    "allpass", "bandpass", "bypass", "compass", "donkey", "highpass", "hockey", "hotkey", "jockey", "lowpass", "monkey",
    "surpass", "trespass", "turkey", "underpass", "whiskey"
))  # fmt: skip
"""Words with these endings that name other things."""
_PARTS = (
    "secret|passw|passphrase|passcode|passkey|credential|apikeys?|(?:access|account|private|shared|ssh|signing|storage)keys?|connectionstring|connstr"
    "|sessionid|seedphrase|mnemonic|webhook|kennwort|motdepasse|contrase"
)
"""Texts that make a name secret wherever they stand in it, its words written together."""
_NUMBERS = "^(?:pass|pw|pwd|pin|otp|mfa|cvv)$|pass(?:w|code|phrase)|p(?:wd|ass|in)$"
"""Words of names whose values are secret even if they are numbers; ``key_dim`` is not among them."""
_SHA1 = "[0-9a-f]{40}"
"""The form of older keys of W&B, and of commits."""
_COMMITS = frozenset(("blob", "checksum", "commit", "digest", "git", "hash", "oid", "rev", "revision", "sha", "sha1", "tree", "version"))  # fmt: skip
_BOUNDARY = r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"


@lru_cache(maxsize=1000)
def is_secret_name(name: str) -> bool:
    """Whether the values of a name, such as ``apiKey`` or ``DB_PASS``, are secret."""
    words = _words(name)
    if "pin" in words and "memory" in words:  # an argument of DataLoader
        return False
    if any(word in _WORDS or (word.endswith(_ENDINGS) and word not in _OTHER_ENDINGS) for word in words):
        return not _counts_tokens(words)
    return re.search(_PARTS, "".join(words)) is not None


def _counts_tokens(words: Sequence[str]) -> bool:
    """Whether a name is that of a number of tokens, such as ``max_tokens`` or ``tokens_per_batch``."""
    return "tokens" in words and ("per" in words or words[0] in ("max", "min", "n", "num", "new", "total"))


def _words(name: str) -> list[str]:
    """The words of a name in lower case, split at case changes and at other characters than letters."""
    return [word.lower() for word in re.split(_BOUNDARY, str(name)[:1000]) if word]


# -- values -------------------------------------------------------------------------------------------------------------------------


def without_secrets(values: Any, key: str = "") -> Any:
    """Copy plain values, with :data:`HIDDEN` in the place of what looks like a secret, by its name or by its form.

    Args:
        values: text, numbers, and mappings and lists of these.
        key: the name of ``values``.
    """
    if isinstance(values, Mapping):
        # The description of an object is not a secret, even if its key is a word such as "key".
        is_secret = is_secret_name(key) and "class_path" not in values
        # {"name": "DB_PASSWORD", "value": "..."}, as Kubernetes writes variables
        named = next((text for text in map(values.get, ("name", "key")) if isinstance(text, str)), "")
        names = {name: named if name == "value" and is_secret_name(named) else name for name in values}
        return {
            hidden_in(name) if isinstance(name, str) else name: without_secrets(item, key if is_secret else names[name])
            for name, item in values.items()
        }
    if isinstance(values, (list, tuple)):
        return _without_secrets(values, key)
    if type(values) is int and any(re.search(_NUMBERS, word) for word in _words(key)) and is_secret_name(key):
        return HIDDEN
    if not isinstance(values, str) or not values:
        return values
    if is_secret_name(key) or (re.fullmatch(_SHA1, values) and not _COMMITS.intersection(_words(key))):
        return HIDDEN
    return hidden_in(values)


def _without_secrets(values: Sequence[Any], key: str) -> list[Any]:
    """Hide the elements of a list: also the values of options (``["--password", "x"]``) and of pairs (``("password", "x")``)."""
    texts = [value for value in values if isinstance(value, str)]
    short_options = any(re.search(_COMMAND, text) for text in texts)
    elements = []
    name = ""
    for index, value in enumerate(values):
        if short_options and isinstance(value, str) and (option := re.fullmatch(_SHORT_OPTION, value)):
            elements.append(f"{option[1]}{HIDDEN}")
        else:
            elements.append(without_secrets(value, key if is_secret_name(key) or not name else name))
        name = ""
        if isinstance(value, str) and len(value) < 100:
            is_option = value.startswith("-") and "=" not in value
            if short_options and re.fullmatch(_SHORT_OPTION_ALONE, value):
                name = "password"
            elif (is_option or (index == 0 and len(values) == 2)) and is_secret_name(value):
                name = value
    return elements


def has_hidden(values: Any) -> bool:
    """Whether plain values are a copy in which :func:`without_secrets` has hidden something."""
    if isinstance(values, Mapping):
        return any(map(has_hidden, values.values()))
    if isinstance(values, (list, tuple)):
        return any(map(has_hidden, values))
    return isinstance(values, str) and (
        values == HIDDEN or re.search(rf"[=:/]\s*{_STARS}(?!\*)|{_STARS}@", values) is not None
    )


# -- text ---------------------------------------------------------------------------------------------------------------------------

_PASSWORD_IN_URL = r"([A-Za-z][A-Za-z0-9+.-]{0,30}:/{1,2})(?:[^/\s]+@|[^/\s:@]{1,256}:(?!\d+/)[^\s@]{1,256}@)"
_PASSWORD_IN_ADDRESS = r"(?<![\w.+/@-])(?!mailto:)[\w.+-]{1,64}:[^\s@/:\"']{1,256}@(?!sha\d)(?=[\w\[(])"
"""``user:password@host``, without the protocol of a URL."""
_URL = r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s\"'<>]+"
_WEBHOOK = r"(://hooks?\.[^/]+/|://(?:hc-ping\.com|ntfy\.sh)/|webhook[^/]{0,64}/|/[\w-]*hooks?/|/with/key/|/bot(?=\d+:)|[?&]code=).+"
"""Addresses at which anybody who knows them can write: the rest of the URL is the secret."""
_VALUE = r"(\"[^\"]*\"?|'[^']*'?|[^\s,;&}\])]+)"
_NAMED_VALUE = rf"(?<![\w.-])([\w.-]+)([\"']?\s*(?:=|:(?!//))\s*){_VALUE}"
_PASSPHRASE = r"(?i:(?<![\w.-])([\w.-]{0,64}(?:passw|passphrase|kennwort)[\w.-]{0,64})([\"']?\s*:(?!//)\s*))([^\s\"',;&}\])][^\n\"',;&}\])]*)"
"""A value of several words, as in YAML."""
_OPTION = rf"(?<!\S)(--?[A-Za-z][\w.-]*)(\s+)(?!--){_VALUE}"
_COMMAND = r"\b(?:mysql|mariadb|mongo|sshpass|docker login|podman login|redis-cli|curl|wget|httpie|ldap|smbclient|7z|7za|zip|unzip|lftp)"
"""Commands whose options of one letter take a password."""
_SHORT_OPTION = r"(?<!\S)(-[aApPuUwW]\s*)(?![\s-])\S+"
_SHORT_OPTION_ALONE = "-[aApPuUwW]"
_FORM = (
    r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*|\bBearer\s+\S+|\beyJ[\w-]{8,2000}\.[\w-]{8,}\.[\w-]*"
    r"|\bBasic\s+(?=[A-Za-z]{0,200}[0-9+/=])[A-Za-z0-9+/]{8,}={0,2}"
    r"|\b(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|glsa_|xox[abeprs]-|xapp-|AKIA|ASIA|AIza|ya29\.|[rs]k_(?:live|test)_|whsec_|npm_|pypi-|dckr_pat_|dop_v1_"
    r"|nvapi-|gsk_|xai-|pplx-|r8_|SG\.|shpat_|ATATT|figd_|hvs\.|tskey-|lin_api_|ntn_|rubygems_|sbp_|PMAK-|wandb_v1_)[\w-]{12,}"
    r"|\blocal-(?=[A-Za-z]{0,200}\d)[A-Za-z0-9]{16,}|\bdapi[0-9a-f]{32}|\bkey-[0-9a-f]{32}"
    r"|(?i:\bauthorization\b\W{1,4}\w+\s+[^\s'\"]+)|(?i:\b(?:set-)?cookie[\"']?\s*[:=])[^\n]+"
)
"""Texts that are secret in themselves."""
_LOGIN = r"(\bwandb\s+login\s+)\S.*"


def hidden_in(text: str) -> str:
    """Return the text with :data:`HIDDEN` in the place of secrets: passwords and signatures in URLs, well-known forms of keys, and values of secret
    names and options."""
    if len(text) < 12 and text.isalnum():
        return text
    text = re.sub(_FORM, HIDDEN, text)
    if "://" in text:
        text = re.sub(_URL, lambda url: re.sub(_WEBHOOK, rf"\1{HIDDEN}", url[0]), text)
    if "@" in text:
        text = re.sub(_PASSWORD_IN_ADDRESS, f"{HIDDEN}@", re.sub(_PASSWORD_IN_URL, rf"\1{HIDDEN}@", text))
    if re.search(_COMMAND, text):
        text = re.sub(_SHORT_OPTION, rf"\1{HIDDEN}", text)
    text = re.sub(_OPTION, _hide_value, re.sub(_PASSPHRASE, _hide_value, re.sub(_LOGIN, rf"\1{HIDDEN}", text)))
    return re.sub(_NAMED_VALUE, _hide_value, text)


def _hide_value(match: re.Match[str]) -> str:
    name, between, _ = match.groups()
    return f"{name}{between}{HIDDEN}" if is_secret_name(name) else match[0]
