-- Delivering results in the order in which their requests arrived: see README.md in this directory.
--
-- The list `order` has an element for each entry: ENTRY SIZE BEFORE: the number of its tickets, and of
-- all that were admitted before it, so that two elements tell how many tickets there are between them.
-- GRANT batcher,worker order lindex lpop
-- GRANT batcher,worker tickets hget hdel hsetnx

-- read_order(order, tickets): the place up to which all is done: `entry`, `size` and `position` (entry is nil if no
-- ticket is left), and `done`, the number of tickets before it. `advance` moves it, and `write_order` writes it.
-- LINDEX and not LRANGE: under the ACL rules of Redis 6, a role that may use LRANGE here may use it on every list that
-- it can read. O(1).
local function read_order(order, tickets)
  local place = { order = order, tickets = tickets, popped = 0, fields = {}, position = 0 }
  function place.read()
    local element = redis.pcall('LINDEX', order, place.popped)
    local entry, size, before = string.match(type(element) == 'string' and element or '', '^(%S+) (%d+) (%d+)$')
    place.entry, place.size, place.position, place.done = entry, tonumber(size), 0, tonumber(before)
  end
  place.read()
  local cursor = redis.pcall('HGET', tickets, 'cursor')
  place.had_cursor = type(cursor) == 'string'
  local entry, position, done = string.match(place.had_cursor and cursor or '', '^(%S+) (%d+) (%d+)$')
  if entry and entry == place.entry then
    place.position, place.done, place.written = tonumber(position), tonumber(done), tonumber(position)
  end
  return place
end

-- The name of the next ticket.
local function next_ticket(place) return place.entry .. ':' .. place.position end

-- advance(place, count, is_fresh): the next `count` tickets are done. `is_fresh`: their results were never withheld.
local function advance(place, count, is_fresh)
  -- A ticket that is alone in its entry is never put back, so that `tickets` has a field only for its withheld result.
  if not (is_fresh and place.size == 1) then place.fields[#place.fields + 1] = next_ticket(place) end
  place.position, place.done = place.position + count, place.done + count
  if place.position >= place.size then
    local put_back = place.size > 1 and redis.pcall('HGET', place.tickets, place.entry)
    for first in string.gmatch(type(put_back) == 'string' and put_back or '', ' (%d+)') do
      place.fields[#place.fields + 1] = place.entry .. ':' .. first
    end
    place.fields[#place.fields + 1] = place.entry
    place.popped = place.popped + 1
    place.read()
  end
end

-- write_order(place): O(what `advance` was called for).
local function write_order(place)
  if place.popped > 0 then redis.pcall('LPOP', place.order, place.popped) end
  if place.had_cursor and (place.position == 0 or not place.entry) then place.fields[#place.fields + 1] = 'cursor' end
  for start = 1, #place.fields, 1000 do
    redis.pcall('HDEL', place.tickets, unpack(place.fields, start, math.min(#place.fields, start + 999)))
  end
  if place.entry and place.position > 0 and (place.popped > 0 or place.position ~= place.written) then
    local cursor = string.format('%s %d %.0f', place.entry, place.position, place.done)
    set_field(place.tickets, 'cursor', cursor)
  end
end

-- count_tickets(order, tickets): of requests that wait or are in flight, and of withheld results. O(1).
local function count_tickets(order, tickets)
  local place, last = read_order(order, tickets), redis.pcall('LINDEX', order, -1)
  local size, before = string.match(type(last) == 'string' and last or '', ' (%d+) (%d+)$')
  return place.entry and size and before + size - place.done or 0
end

-- deliver_parts(parts): deliver results in their order. Successive ones for one stream become one entry. Parts are a
-- whole group in the usual case, and its payload is then not copied.
local function deliver_parts(parts)
  local start = 1
  while start <= #parts do
    local group, stop, size, is_whole = parts[start].group, start, 0, true
    local key, kind, ttl_ms = group.key, group.kind, group.ttl_ms
    repeat
      local part, before = parts[stop], parts[stop - 1]
      is_whole = is_whole and part.group == group and (stop == start or part.first_byte > before.first_byte)
      size = size + (kind == 'stream' and part.count or 1)
      stop = stop + 1
      local following = parts[stop] and parts[stop].group
    until not following or kind == 'list'
      or following ~= group and (following.key ~= key or following.kind ~= kind or following.ttl_ms ~= ttl_ms)
    if is_whole and stop - start == group.parts then
      deliver(key, kind, group.payload, ttl_ms)
    else
      local elements = {}
      for at = start, stop - 1 do elements[#elements + 1] = elements_of(parts[at]) end
      deliver(key, kind, array_head(size) .. table.concat(elements), ttl_ms)
    end
    start = stop
  end
end

-- withhold(place, part): keep a result until those before it are done. Returns whether that is necessary and possible.
-- It is not if the ticket is not in the order (the user deleted a key, or the batch, so that the ticket was freed).
local function withhold(place, part)
  local entry, first = parse_ticket(part.field)
  if entry == place.entry and first < place.position then return false end
  if not is_in_order(place.tickets, entry, first, part.count) then return false end
  if redis.pcall('HSETNX', place.tickets, part.field, withheld(part)) == 1 then return true end
  local is_stale = parse_waiting(redis.pcall('HGET', place.tickets, part.field))
  return is_stale and set_field(place.tickets, part.field, withheld(part))
end

-- release(order, tickets, arrived): deliver these results and withheld ones from the front of the order, up to the
-- first ticket whose result is not there yet, but at most about 1,000 results and 8 MiB: Redis serves nothing else
-- meanwhile. Those of `arrived` (see `take_result`) that are not delivered are withheld.
-- Returns whether there is more to deliver. O(arrived + delivered), and O(bytes).
local function release(order, tickets, arrived)
  local results_max, bytes_max = 1000, 8388608
  local place, parts, results, size_bytes = read_order(order, tickets), {}, 0, 0
  local has_more = false
  while place.entry do
    local field = next_ticket(place)
    local fresh = arrived[field]
    local part = fresh or parse_withheld(redis.pcall('HGET', tickets, field))
    if not part then break end
    has_more = results >= results_max or size_bytes >= bytes_max
    if has_more then break end
    part.is_delivered = true
    parts[#parts + 1] = part
    results, size_bytes = results + part.count, size_bytes + part.bytes
    advance(place, part.count, fresh)
  end
  deliver_parts(parts)
  write_order(place)
  for _, part in ipairs(arrived) do
    if not part.is_delivered and not withhold(place, part) then deliver_parts({ part }) end
  end
  return has_more
end

-- take_result(arrived, ranges, key, kind, payload, ttl_ms): deliver results without tickets now; collect those that
-- have some in `arrived`, for `release`: a list of parts, also by the name of their first ticket.
-- `ranges`: '' or for each part a range and its number of bytes in the payload, ENTRY:FIRST+COUNT=BYTES. O(ranges).
local function take_result(arrived, ranges, key, kind, payload, ttl_ms)
  if ranges == '' then return deliver(key, kind, payload, ttl_ms) end
  local group = { key = key, kind = kind, payload = payload, ttl_ms = ttl_ms, parts = 0 }
  local first_byte = 1 + array_head_bytes(group)
  for field, count, bytes in string.gmatch(ranges, '(%S+:%d+)%+(%d+)=(%d+)') do
    local part = { field = field, count = tonumber(count), bytes = tonumber(bytes), group = group }
    part.first_byte = first_byte
    first_byte = first_byte + part.bytes
    group.parts = group.parts + 1
    arrived[#arrived + 1] = part
    arrived[field] = part
  end
end
