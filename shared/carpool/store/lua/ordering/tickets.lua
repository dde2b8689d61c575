-- Tickets: the hash `held` says what is known of them. This file alone builds and parses its values.
--
-- A ticket is a place in an entry: ENTRY:POSITION, ENTRY being the ID under which its request arrived. Everything is
-- kept for ranges of them, which have the name of their first ticket. A range is an argument ENTRY:FIRST+COUNT.
--
--   field         value
--   ENTRY         SIZE                            its positions before SIZE are in the order
--   ENTRY:FIRST   w COUNT ENTRY_ID                these requests were put back in this entry of the request stream
--                 r COUNT KIND TTL_MS KEY PAYLOAD their results are withheld, in the form that `deliver` needs
--                 g COUNT                         a gap: these requests were refused on arrival
--   cursor        ENTRY POSITION DONE             the first entry of the order is done up to this position; see order.lua
--
-- What was not put back is in the entry in which it arrived, or in flight: the batch has its tickets. README.md in this
-- directory lists the transitions.

local function waiting_in(count, entry_id) return 'w ' .. count .. ' ' .. entry_id end

local function gap(count) return 'g ' .. count end

local function withheld(part)
  return table.concat({ 'r', part.count, part.kind, part.ttl_ms, part.key, part.payload }, ' ')
end

-- parse_done(value): a withheld result or a gap as a table; nil for everything else.
local function parse_done(value)
  if type(value) ~= 'string' then return nil end
  local count, kind, ttl_ms, key, payload_start = string.match(value, '^r (%d+) (%a+) (%d+) (%S+) ()')
  if count then
    local payload = string.sub(value, payload_start)
    return { count = tonumber(count), kind = kind, ttl_ms = ttl_ms, key = key, payload = payload }
  end
  count = string.match(value, '^g (%d+)$')
  return count and { count = tonumber(count), kind = 'gap', payload = '' }
end

-- parse_waiting(value): the ID of the entry in which a range was put back; nil for everything else.
local function parse_waiting(value) return type(value) == 'string' and string.match(value, '^w %d+ (%S+)$') or nil end

-- parse_range(range): entry, first position and number of tickets.
local function parse_range(range)
  local entry, first, count = string.match(range, '^(%S+):(%d+)%+(%d+)$')
  return entry, tonumber(first), tonumber(count)
end

-- is_in_order(held, entry, first, count): whether these tickets were admitted, and their entry is not done.
local function is_in_order(held, entry, first, count)
  local size = redis.pcall('HGET', held, entry)
  return type(size) == 'string' and first + count <= tonumber(size)
end

-- set_field(held, field, value): returns whether it could be set. HDEL and HSETNX instead of HSET: under the ACL rules
-- of Redis 6, a role that may use HSET here may use it on every hash that it can write. O(1).
local function set_field(held, field, value)
  redis.pcall('HDEL', held, field)
  return redis.pcall('HSETNX', held, field, value) == 1
end

