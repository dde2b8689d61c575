-- Results in the order in which their requests arrived (preserve_ordering). A request has a ticket, which it took
-- at its arrival; until its slot's turn comes, its result is held.
--
--   order   list: the tickets of requests that wait, are in flight, or are held, as they arrived
--   held    hash, for each of these tickets: 'w' and the entry in which its request waits, or 'b' and the batch
--           in which it is in flight, or 'r' and its result, with all that is needed to deliver it
--
-- A request without a ticket, or whose ticket is not held (any more), waits for nobody. Keys of another type cost
-- the order, never a result.

-- deliver_in_order(held, ticket, key, kind, payload, ttl_ms): deliver, or hold for `release`. The payload
-- of one with a ticket is a lone envelope, also where it goes on a stream. O(1).
local function deliver_in_order(held, ticket, key, kind, payload, ttl_ms)
  if ticket ~= '' then
    local result = 'r' .. kind .. ' ' .. ttl_ms .. ' ' .. key .. ' ' .. payload
    if move(held, ticket, result) then return end
    if kind == 'stream' then payload = '\145' .. payload end
  end
  deliver(key, kind, payload, ttl_ms)
end

-- The msgpack array of these envelopes.
local function array_of(envelopes)
  local size = #envelopes
  local head = size < 16 and string.char(144 + size)
    or string.char(220, math.floor(size / 256), size % 256)
  return head .. table.concat(envelopes)
end

-- release(order, held): deliver what is held and has nobody before it, as much as one script should do.
-- Returns 1 if there is more to deliver. O(results delivered), and O(bytes).
local function release(order, held)
  local most, most_bytes = 1000, 8388608
  local gone, size_bytes = {}, 0
  local stream, stream_ttl_ms, envelopes = nil, nil, {}
  local function flush()
    if stream then deliver(stream, 'stream', array_of(envelopes), stream_ttl_ms) end
    stream, envelopes = nil, {}
  end

  local more = 1
  while #gone < most and size_bytes < most_bytes do
    local ticket = redis.pcall('LINDEX', order, #gone)
    local what = type(ticket) == 'string' and redis.pcall('HGET', held, ticket)
    if type(what) ~= 'string' or string.sub(what, 1, 1) ~= 'r' then
      more = 0
      break
    end
    local kind, ttl_ms, key, begins = string.match(what, '^r(%a+) (%d+) (%S+) ()')
    local payload = string.sub(what, begins)
    if key ~= stream or ttl_ms ~= stream_ttl_ms then flush() end
    if kind == 'stream' then
      stream, stream_ttl_ms = key, ttl_ms
      envelopes[#envelopes + 1] = payload
    else
      deliver(key, kind, payload, ttl_ms)
    end
    gone[#gone + 1] = ticket
    size_bytes = size_bytes + #payload
  end
  flush()
  if #gone > 0 then
    redis.call('LPOP', order, #gone)
    redis.call('HDEL', held, unpack(gone))
  end
  return more
end

