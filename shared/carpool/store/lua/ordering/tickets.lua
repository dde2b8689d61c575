-- Tickets: the hash `tickets` says what is known of them. This file alone builds and parses its values.
--
-- A ticket is a place in an entry: ENTRY:POSITION, ENTRY being the ID under which its request arrived. Everything is
-- kept for ranges of them, which have the name of their first ticket. A range is an argument ENTRY:FIRST+COUNT.
--
--   field         value
--   ENTRY         SIZE [FIRST ...]                the number of its tickets; where ranges begin that were put back
--   ENTRY:FIRST   w COUNT ENTRY_ID                these requests were put back in this entry of the request stream
--                 r COUNT KIND TTL_MS KEY PAYLOAD their results are withheld, in the form that `deliver` needs
--   cursor        ENTRY POSITION DONE             the first entry of the order is done up to here; see order.lua
--
-- What was not put back is in the entry in which it arrived, or in flight: the batch has its tickets. README.md in
-- this directory lists the transitions.
-- GRANT batcher,worker tickets hget hdel hsetnx

local function waiting_in(count, entry_id) return 'w ' .. count .. ' ' .. entry_id end

-- Results that a script gets together for one place are a group: key, kind, payload, ttl_ms, and its number of parts.
-- A part is what has one range of tickets: their number `count`, and the elements of the group's payload from
-- `first_byte` on, together `bytes` long. The payload for a stream is a msgpack array; that for a list is one part.

-- array_head(size): what a msgpack array of this size begins with.
local function array_head(size)
  if size < 16 then return string.char(144 + size) end
  return string.char(220, math.floor(size / 256), size % 256)
end

-- array_head_bytes(group): how long that is.
local function array_head_bytes(group)
  if group.kind == 'list' then return 0 end
  return ({ [220] = 3, [221] = 5 })[string.byte(group.payload)] or 1
end

local function elements_of(part)
  return string.sub(part.group.payload, part.first_byte, part.first_byte + part.bytes - 1)
end

local function withheld(part)
  local group, payload = part.group, part.group.payload
  if group.parts > 1 then
    payload = array_head(group.kind == 'stream' and part.count or 1) .. elements_of(part)
  end
  return table.concat({ 'r', part.count, group.kind, group.ttl_ms, group.key, payload }, ' ')
end

-- parse_withheld(value): a withheld result as a part, alone in its group; nil for everything else.
local function parse_withheld(value)
  if type(value) ~= 'string' then return nil end
  local count, kind, ttl_ms, key, payload_start = string.match(value, '^r (%d+) (%a+) (%d+) (%S+) ()')
  if not count then return nil end
  local group = { key = key, kind = kind, payload = string.sub(value, payload_start), ttl_ms = ttl_ms, parts = 1 }
  local head_bytes = array_head_bytes(group)
  return { count = tonumber(count), group = group, first_byte = 1 + head_bytes, bytes = #group.payload - head_bytes }
end

-- parse_waiting(value): the ID of the entry in which a range was put back; nil for everything else.
local function parse_waiting(value) return type(value) == 'string' and string.match(value, '^w %d+ (%S+)$') or nil end

-- parse_range(range): entry, first position and number of tickets.
local function parse_range(range)
  local entry, first, count = string.match(range, '^(%S+):(%d+)%+(%d+)$')
  return entry, tonumber(first), tonumber(count)
end

-- parse_ticket(ticket): entry and position.
local function parse_ticket(ticket)
  local entry, position = string.match(ticket, '^(%S+):(%d+)$')
  return entry, tonumber(position)
end

-- is_in_order(tickets, entry, first, count): whether these tickets were admitted, and their entry is not done.
local function is_in_order(tickets, entry, first, count)
  local value = redis.pcall('HGET', tickets, entry)
  local size = type(value) == 'string' and tonumber(string.match(value, '^%d+'))
  return size and first + count <= size or false
end

-- set_field(tickets, field, value): returns whether it could be set. HDEL and HSETNX instead of HSET: under the ACL
-- rules of Redis 6, a role that may use HSET here may use it on every hash that it can write. O(1).
local function set_field(tickets, field, value)
  redis.pcall('HDEL', tickets, field)
  return redis.pcall('HSETNX', tickets, field, value) == 1
end

-- mark_waiting(tickets, range, entry_id): a range was put back in this entry. O(times that requests of the
-- entry in which they arrived were put back).
local function mark_waiting(tickets, range, entry_id)
  local entry, first, count = parse_range(range)
  if is_in_order(tickets, entry, first, count) then
    set_field(tickets, entry, redis.pcall('HGET', tickets, entry) .. ' ' .. first)
    set_field(tickets, entry .. ':' .. first, waiting_in(count, entry_id))
  end
end

