"""Pages of the console while Redis does not answer: those of one model do not hold up the others."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from carpool.keys import Keys
from support.console import Browser, printed_password
from support.stack import Stack
from support.waiting import wait_until

LISTS = 24  # in turn they would take 2 min


def test_lists_of_dead_letters_that_wait_for_redis_fail_together(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.redis.xadd(Keys("Echo").dead, {"reason": "it died", "body": "1"})
        browser = Browser(stack.console())
        browser.sign_in(*printed_password(stack.services[-1]))
        assert browser.get("/models/Echo/dead").code == 200
        server = stack.redis.info("server")["process_id"]
        codes: list[int] = []
        lists = [
            threading.Thread(target=lambda: codes.append(browser.get("/models/Echo/dead").code), daemon=True)
            for _ in range(LISTS)
        ]
        os.kill(server, signal.SIGSTOP)
        try:
            for one in lists:
                one.start()
            wait_until(lambda: len(codes) == LISTS, description="all lists are answered", timeout_s=60)
        finally:
            os.kill(server, signal.SIGCONT)
        assert set(codes) == {503}
        assert browser.get("/models/Echo/dead").code == 200
