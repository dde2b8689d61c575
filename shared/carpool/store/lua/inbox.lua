-- What the batcher of a bound model tells one of its processes (see `carpool.wire.inbox`).
--
-- A process has at most one batch in flight, and fewer ends than slots are unread: so trimming loses nothing. An inbox
-- expires because a process may have died before it read it, or never existed.
--
-- tell_process(inbox, field, value): add a message to the inbox of a process. A user may have made the key another
-- type: then the process is told nothing, which costs its sequences, and no others. O(1).
-- GRANT batcher inbox xadd pexpire
local INBOX_MESSAGES_MAX = 10000
local INBOX_TTL_MS = 24 * 3600 * 1000
local function tell_process(inbox, field, value)
  redis.pcall('XADD', inbox, 'MAXLEN', '~', INBOX_MESSAGES_MAX, '*', field, value)
  redis.call('PEXPIRE', inbox, INBOX_TTL_MS)
end
