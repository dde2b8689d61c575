-- deliver(key, kind, payload, ttl_ms): write results where their producer looks for them. Returns the length of a list.
-- O(1).
--   kind 'list'     RPUSH an envelope on the result's own list
--   kind 'stream'   XADD one entry, field `results`, on a reply stream; entries older than the TTL are trimmed
--   kind 'columns'  the same, with a field `columns`
--   kind 'done', 'failed', 'dead'  as 'stream', the one result of a request whose name the stream has. If there is a
--                   record of it (record.lua), that has this state then, and the result is kept as long as it says
-- If a producer made the key another type, or used up the stream's IDs, its result is dropped. An error would also
-- stop the rest of the script, and so cost other producers their results.
--
-- When its memory is full, Redis rejects a script at its first write, unless that command is one that never needs
-- memory (XDEL, XACK, HDEL, ...); after such a first write the script may run any command. Therefore every script
-- that calls `deliver` starts with such a write, if need be one that changes nothing: so a full Redis can still be
-- emptied.
-- GRANT batcher,worker result rpush pexpire
-- GRANT batcher,worker replies xadd pexpire
local STATES = { done = true, failed = true, dead = true }
local started_ms  -- a script asks for the time once, not for each of its streams
local function deliver(key, kind, payload, ttl_ms)
  local reply
  local record = STATES[kind] and find_record(key)
  if kind == 'list' then
    reply = redis.pcall('RPUSH', key, payload)
  elseif record then  -- in place of an earlier result: its dead letter was sent again
    reply = redis.pcall('XADD', key, 'MAXLEN', 1, '*', 'results', payload)
  else
    started_ms = started_ms or tonumber(redis.call('TIME')[1]) * 1000
    reply = redis.pcall('XADD', key, 'MINID', '~', string.format('%.0f', started_ms - ttl_ms), '*',
      kind == 'columns' and 'columns' or 'results', payload)
  end
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'WRONGTYPE', 1, true) or string.find(reply.err, 'exhausted', 1, true) then return end
    error(reply.err)
  end
  redis.call('PEXPIRE', key, record and settle_record(record, kind, ttl_ms) or ttl_ms)
  return reply
end

-- deliver_alike(take, ttl_ms, is_missing): deliver results that differ only in their correlation IDs, on lists of their
-- own; nothing if the entry `is_missing`. Arguments are read with `take`: the index in KEYS of the first list, and how
-- many follow one another from there; how many bytes of each key come before the correlation ID; 'json' or 'msgpack';
-- the envelope up to the correlation ID, and from there on. O(results).
local function deliver_alike(take, ttl_ms, is_missing)
  local first, number, id_at, is_msgpack = tonumber(take()), tonumber(take()), take() + 1, take() == 'msgpack'
  local head, tail = take(), take()
  if is_missing then return end
  for k = first, first + number - 1 do
    local key = KEYS[k]
    local id, before = string.sub(key, id_at), ''
    if is_msgpack then before = #id < 32 and string.char(160 + #id) or string.char(217, #id) end
    deliver(key, 'list', head .. before .. id .. tail, ttl_ms)
  end
end
