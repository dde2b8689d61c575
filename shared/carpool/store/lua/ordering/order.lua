-- Delivering results in the order in which their requests arrived: see README.md in this directory.

-- deliver_in_order(held, ticket, key, kind, payload, ttl_ms): withhold the result if its request has a ticket, for
-- `release` to deliver; else deliver it now. O(1).
-- With a ticket the payload is always a single envelope. A stream's entries carry arrays of envelopes: if the result
-- goes to a stream, the array is made here or by `release`.
local function deliver_in_order(held, ticket, key, kind, payload, ttl_ms)
  if ticket ~= '' then
    if update_ticket(held, ticket, withheld_result(kind, ttl_ms, key, payload)) then return end
    if kind == 'stream' then payload = '\145' .. payload end -- msgpack: an array of one
  end
  deliver(key, kind, payload, ttl_ms)
end

-- The envelopes as one msgpack array.
local function array_of(envelopes)
  local size = #envelopes
  local head = size < 16 and string.char(144 + size)
    or string.char(220, math.floor(size / 256), size % 256)
  return head .. table.concat(envelopes)
end

-- release(order, held): deliver withheld results from the front of the order, up to the first ticket whose result is
-- not there yet, but at most 1,000 results and about 8 MiB: Redis serves nothing else meanwhile.
-- Returns whether there is more to deliver. O(results delivered), and O(bytes).
local function release(order, held)
  local results_max, bytes_max = 1000, 8388608
  local tickets, size_bytes = {}, 0
  -- Successive results for one reply stream become one entry.
  local stream, stream_ttl_ms, envelopes = nil, nil, {}
  local function flush()
    if stream then deliver(stream, 'stream', array_of(envelopes), stream_ttl_ms) end
    stream, envelopes = nil, {}
  end

  local has_more = true
  while #tickets < results_max and size_bytes < bytes_max do
    local ticket = redis.pcall('LINDEX', order, #tickets)
    local value = type(ticket) == 'string' and redis.pcall('HGET', held, ticket)
    if not is_withheld(value) then
      has_more = false
      break
    end
    local kind, ttl_ms, key, payload = parse_withheld(value)
    if key ~= stream or ttl_ms ~= stream_ttl_ms then flush() end
    if kind == 'stream' then
      stream, stream_ttl_ms = key, ttl_ms
      envelopes[#envelopes + 1] = payload
    else
      deliver(key, kind, payload, ttl_ms)
    end
    tickets[#tickets + 1] = ticket
    size_bytes = size_bytes + #payload
  end
  flush()
  if #tickets > 0 then
    redis.call('LPOP', order, #tickets)
    redis.call('HDEL', held, unpack(tickets))
  end
  return has_more
end

