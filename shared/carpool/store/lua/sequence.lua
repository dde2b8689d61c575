-- change_sequence(index, take, is_effective): carry out what the result of a request does to its sequence, unless
-- `is_effective` is false. O(log n) for n sequences, and O(bytes of its state).
--
-- `index` is the sorted set of all sequences that are kept. Arguments are read with `take`: index in KEYS of the
-- sequence's hash, sequence ID, place of the request, correlation ID, outcome, content. Outcomes:
--   started, kept  the request succeeded: the content is the state for the next one. `started`: it was the first one
--   ended          the request succeeded, and was the last one
--   broken         it did not succeed; the content says why. Requests with later places are not served any more
--
-- A request may be refused while an earlier one of its sequence is still in flight: then the sequence is broken from
-- the later place on, and the earlier one must not undo that. Places are compared as text.
local SEQUENCE_TTL_MS = 24 * 3600 * 1000  -- batchers end idle sequences much earlier; this is for when none runs
local sequence_changed_ms  -- a script asks for the time once

local function change_sequence(index, take, is_effective)
  local key, id, place = KEYS[tonumber(take())], take(), take()
  local correlation_id, outcome, content = take(), take(), take()
  if not is_effective then return end
  local mark = redis.pcall('HMGET', key, 'broken_at', 'broken')
  if mark.err then return end  -- a user made the key another type: the sequence has no state
  local is_broken_later = mark[1] and mark[1] > place
  if not sequence_changed_ms then
    local now = redis.call('TIME')
    sequence_changed_ms = now[1] .. string.format('%03d', math.floor(now[2] / 1000))
  end
  if outcome == 'broken' then
    if is_broken_later then return end
    redis.call('HSET', key, 'broken', content, 'broken_at', place)
  elseif outcome == 'kept' then
    redis.call('HSET', key, 'state', content, 'last', correlation_id)
    redis.call('HINCRBY', key, 'next', 1)
  else
    redis.call('DEL', key)
    if is_broken_later then redis.call('HSET', key, 'broken_at', mark[1], 'broken', mark[2]) end
    if outcome == 'started' then
      redis.call('HSET', key, 'state', content, 'last', correlation_id, 'next', 1)
    elseif not is_broken_later then
      redis.pcall('ZREM', index, id)
      return
    end
  end
  redis.call('PEXPIRE', key, SEQUENCE_TTL_MS)
  redis.pcall('ZADD', index, sequence_changed_ms, id)
end

-- change_sequences(index, take, is_effective): the same for a list of changes. O(changes).
local function change_sequences(index, take, is_effective)
  for _ = 1, tonumber(take()) do change_sequence(index, take, is_effective) end
end
