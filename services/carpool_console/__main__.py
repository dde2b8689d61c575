"""`carpool console`: reads settings, builds the service, waits for a signal; or changes the users."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import structlog

from carpool.address import bracketed, without_password
from carpool.health_server import serve_health
from carpool.lifecycle import stop_on_signals
from carpool.logs import configure_logs
from carpool.process_names import new_process_name
from carpool.settings import ConsoleSettings, read_settings
from carpool.shown import complain

try:
    import jinja2 as _jinja2  # noqa: F401
    import starlette as _starlette  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ModuleNotFoundError:
    complain("carpool console: a package is missing; install Carpool with it: pip install 'PATH[console]'")
    raise SystemExit(2) from None

from carpool_console.meter import ConsoleMetrics
from carpool_console.service import ConsoleService
from carpool_console.users import FIRST_USER, User, Users, default_users_file, hash_of, new_password


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT, or change the file of users. Returns 1 if that fails."""
    settings = read_settings(ConsoleSettings, argv, "carpool console")
    try:
        users = Users(settings.users or default_users_file())
        if settings.add_user or settings.remove_user:
            return _change_users(settings, users)
        _add_first_user(users)
    except (OSError, ValueError, RuntimeError) as error:  # the last: there is no home
        complain(f"carpool console: the file of users: {error}; --users names another one")
        return 1
    configure_logs(settings.log_level, "console")
    stop = stop_on_signals()
    log, name, metrics = structlog.get_logger(), new_process_name(), ConsoleMetrics()
    try:
        service = ConsoleService(settings, users, metrics, name)
        serve_health(settings, metrics, service)
        port = service.start(on_end=stop.set)
    except OSError as error:
        log.error("console cannot start", reason=str(error))
        return 1
    log.info(
        "console started",
        console=name,
        url=f"http://{bracketed(settings.host)}:{port}",
        redis=without_password(settings.redis_url),
        users=str(users.path),
    )
    stop.wait()
    if not service.stop():
        log.error("console ended by itself", console=name)
        return 1
    log.info("console stopped", console=name)
    return 0


def _change_users(settings: ConsoleSettings, users: Users) -> int:
    if settings.remove_user:
        if not users.remove(settings.remove_user):
            complain(f"carpool console: {users.path} has no user {settings.remove_user!r:.80}")
            return 1
        print(f"{settings.remove_user} may not sign in any more")
        return 0
    password = new_password()
    is_new = users.put(User(settings.add_user, settings.role, hash_of(password)))
    told = "may sign in" if is_new else "has a new password; sessions with the old one have ended"
    print(f"{settings.add_user} ({settings.role}) {told}; password: {password}")
    return 0


def _add_first_user(users: Users) -> None:
    """On the first start. The password is printed, not logged: logs are kept, and read by many."""
    password = users.add_first()
    if not password:
        return
    print(f"Sign in as {FIRST_USER} with the password {password}", flush=True)
    print(f"It is not shown again; {users.path} has its hash. More users: carpool console --add-user NAME")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
