# SPDX-License-Identifier: Apache-2.0
"""The job's secret: given, generated, or kept in the user's own file. It is never printed and never sent.

Imported by the launcher's start.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from rankwise.errors import ConfigurationError
from rankwise.world.environments.reading import SECRET_NAME, job_secret

SECRET_BYTES = 32
_PERMISSIONS_OF_OTHERS = 0o077


def draw_secret() -> str:
    """Return a new secret."""
    return secrets.token_hex(SECRET_BYTES)


def secret_shared_by_machines() -> str:
    """Return the secret that this user's launchers on several machines share.

    ``RANKWISE_SECRET`` if set; else the file ``~/.config/rankwise/secret``, which is created if it does not
    exist. Machines with a shared home folder share the file automatically.

    Raises:
        ConfigurationError: the variable is set but empty; the file cannot be read or created, or others can read it.
    """
    given = job_secret(os.environ)
    if given is not None:
        return given
    path = _secret_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_secret_file(path)
        status = path.stat()
        if status.st_mode & _PERMISSIONS_OF_OTHERS or status.st_uid != os.getuid():
            raise ConfigurationError(f"Other users own or can read the secret in {path}.", do=f"chmod 600 {path}")
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigurationError(
            f"The secret of your machines cannot be stored in {path}: {error.strerror}.",
            do=f"set {SECRET_NAME} to the same long random text on every machine",
        ) from error
    if not text:
        raise ConfigurationError(f"The secret in {path} is empty.", do=f"rm {path}")
    return text


def _secret_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rankwise" / "secret"


def _make_secret_file(path: Path) -> None:
    """Write a new secret to ``path`` unless there is one; a concurrent process finds it complete."""
    if path.exists():
        return
    partial = path.with_name(f"secret.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(draw_secret() + "\n")
    try:
        # Unlike a rename, a link does not replace a file that another machine has written meanwhile.
        os.link(partial, path)
    except FileExistsError:
        pass
    finally:
        partial.unlink()
