-- change_sequence(index, take, is_effective): carry out what the result of a request does to its sequence, unless
-- `is_effective` is false. Returns the ID of the sequence if it was broken. O(log n) for n sequences, and O(bytes of
-- its state).
--
-- `index` is the sorted set of all sequences that are kept. Arguments are read with `take`: index in KEYS of the
-- sequence's hash, sequence ID, place of the request, correlation ID, outcome, content. Outcomes:
--   started, kept  the request succeeded: the content is the state for the next one. `started`: it was the first one
--   ended          the request succeeded, and was the last one
--   broken         it did not succeed; the content says why. Requests with later places are not served any more
--
-- A request may be refused while an earlier one of its sequence is still in flight: then the sequence is broken from
-- the later place on, and the earlier one must not undo that. Places are compared as text.
--
-- A user may make a key or a field anything, so no command may raise. What cannot be written is lost: then the next
-- request of the sequence is ABORTED, because there is no state for it.
local SEQUENCE_TTL_MS = 24 * 3600 * 1000  -- batchers end idle sequences much earlier; this is for when none runs
local sequence_changed_ms  -- a script asks for the time once

local function change_sequence(index, take, is_effective)
  local key, id, place = KEYS[tonumber(take())], take(), take()
  local correlation_id, outcome, content = take(), take(), take()
  if not is_effective then return end
  local broken = outcome == 'broken' and id
  local mark = redis.pcall('HMGET', key, 'broken_at', 'broken')
  if mark.err then mark = {} end
  local is_broken_later = mark[1] and mark[1] > place
  if not sequence_changed_ms then
    local now = redis.call('TIME')
    sequence_changed_ms = now[1] .. string.format('%03d', math.floor(now[2] / 1000))
  end
  if broken then
    if is_broken_later then  -- what stands between the two places has no state to go on with
      redis.pcall('HDEL', key, 'state', 'next', 'last')
      return broken
    end
    redis.pcall('HSET', key, 'broken', content, 'broken_at', place)
  elseif outcome == 'kept' then
    redis.pcall('HSET', key, 'state', content, 'last', correlation_id)
    redis.pcall('HINCRBY', key, 'next', 1)
  else
    redis.call('DEL', key)
    if is_broken_later then redis.pcall('HSET', key, 'broken_at', mark[1], 'broken', mark[2]) end
    if outcome == 'started' then
      redis.pcall('HSET', key, 'state', content, 'last', correlation_id, 'next', 1)
    elseif not is_broken_later then
      redis.pcall('ZREM', index, id)
      return
    end
  end
  redis.call('PEXPIRE', key, SEQUENCE_TTL_MS)
  redis.pcall('ZADD', index, sequence_changed_ms, id)
  return broken
end

-- change_sequences(take, is_effective): the same for the changes that `carpool.store.sequences` writes: their number,
-- the index in KEYS of the sorted set if there are any, and the arguments of each. Returns the ID of the last sequence
-- that was broken. O(changes).
local function change_sequences(take, is_effective)
  local changes = tonumber(take())
  if changes == 0 then return end
  local index, broken = KEYS[tonumber(take())]
  for _ = 1, changes do broken = change_sequence(index, take, is_effective) or broken end
  return broken
end
