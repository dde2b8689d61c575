-- change_sequences(take, is_effective): carry out what results do to the sequences of their requests, unless
-- `is_effective` is false. Returns the ID of the last sequence that was broken, if one was. O(changes * log n) for n
-- sequences, and O(bytes of their states).
--
-- `take` reads what `carpool.store.arguments` writes: the number of changes; if there are any, the index in KEYS of
-- the sorted set of all sequences that are kept; and for each change the index in KEYS of the sequence's hash, its ID,
-- the place of the request, its correlation ID, an outcome and a content. Outcomes: started, kept  the request
-- succeeded: the content is the state for the next one. `started`: it was the first one ended          the request
-- succeeded, and was the last one broken         it did not succeed; the content says why. Requests with later places
-- are not served any more
--
-- A request may be refused while earlier ones of its sequence wait or are in flight: then the sequence is broken from
-- the later place on, and the earlier ones are still served with its state. Several may be refused, in any order, with
-- starts between them. `broken_at` is the last such place, and `failed_at` the first one, if that is another: where
-- the state ends. Places are compared as text.
--
-- A user may make a key or a field anything, so no command may raise. What cannot be written is lost: then the next
-- request of the sequence is ABORTED, because there is no state for it.
-- GRANT batcher,worker sequence hmget hset hdel del pexpire
-- GRANT batcher,worker sequences zadd zrem
local SEQUENCE_TTL_MS = 24 * 3600 * 1000  -- batchers end idle sequences much earlier; this is for when none runs
local SCORES_MAX = 1000  -- in one command
local sequence_changed_ms  -- a script asks for the time once

-- change_sequence(take): one of these changes. Returns the ID of the sequence, whether it was broken, and whether
-- anything of it is kept.
local function change_sequence(take, is_effective)
  local key, id, place = KEYS[tonumber(take())], take(), take()
  local correlation_id, outcome, content = take(), take(), take()
  if not is_effective then return end
  local known = redis.pcall('HMGET', key, 'broken_at', 'broken', 'next', 'failed_at')
  if known.err then known = {} end
  local broken_at, failed_at = known[1], known[4]
  local is_broken_later = broken_at and broken_at > place
  if outcome == 'broken' then
    local first = failed_at or broken_at
    if not is_broken_later then
      redis.pcall('HSET', key, 'broken', content, 'broken_at', place)
      broken_at = place
    end
    if not first or first > place then first = place end
    if first ~= broken_at then redis.pcall('HSET', key, 'failed_at', first) end
  elseif outcome == 'kept' then
    redis.pcall('HSET', key, 'state', content, 'last', correlation_id, 'next', (tonumber(known[3]) or 0) + 1)
  else
    redis.call('DEL', key)
    if outcome == 'started' then
      redis.pcall('HSET', key, 'state', content, 'first', correlation_id, 'last', correlation_id, 'next', 1)
    elseif not is_broken_later then
      return id, false, false
    end
    if is_broken_later then redis.pcall('HSET', key, 'broken_at', broken_at, 'broken', known[2]) end
    if is_broken_later and failed_at and failed_at > place then redis.pcall('HSET', key, 'failed_at', failed_at) end
  end
  redis.call('PEXPIRE', key, SEQUENCE_TTL_MS)
  return id, outcome == 'broken', true
end

local function change_sequences(take, is_effective)
  local changes = tonumber(take())
  if changes == 0 then return end
  local index = KEYS[tonumber(take())]
  if not sequence_changed_ms then
    local now = redis.call('TIME')
    sequence_changed_ms = now[1] .. string.format('%03d', math.floor(now[2] / 1000))
  end
  local scores, last_broken = {}, nil
  for change = 1, changes do
    local id, is_broken, is_kept = change_sequence(take, is_effective)
    if is_broken then last_broken = id end
    if is_kept then
      scores[#scores + 1] = sequence_changed_ms
      scores[#scores + 1] = id
    elseif id then
      redis.pcall('ZREM', index, id)
    end
    if #scores > 0 and (#scores >= SCORES_MAX or change == changes) then
      redis.pcall('ZADD', index, unpack(scores))
      scores = {}
    end
  end
  return last_broken
end
