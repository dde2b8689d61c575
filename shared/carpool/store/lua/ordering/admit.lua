-- admit: put the tickets of entries at the end of the order, before any of their requests may be dispatched. Tickets
-- that are in the order already stay where they are, so repeating the script changes nothing.
--
-- An entry that was put back names the tickets that its requests have. Any producer can write such an entry, so they
-- count only if `held` has them in this entry.
--
-- KEYS  1 order   2 held
-- ARGV  1 entries with tickets of their own: ID SIZE ID SIZE ...
--       2.. list of entries that say that ranges were put back in them: ID; list of these ranges
-- Returns { the number of tickets in the order, indexes in that list of the entries whose ranges are not theirs ... }
-- O(entries + ranges).
redis.pcall('HDEL', KEYS[2], '') -- must be the first write: see deliver.lua
local last = redis.pcall('LINDEX', KEYS[1], -1)
local last_size, before = string.match(type(last) == 'string' and last or '', ' (%d+) (%d+)$')
before = last_size and last_size + before or 0
local elements, ids, forged = {}, {}, {}
for id, size in string.gmatch(ARGV[1], '(%S+) (%d+)') do
  if redis.pcall('HSETNX', KEYS[2], id, size) == 1 then
    ids[#ids + 1] = id
    elements[#elements + 1] = string.format('%s %s %.0f', id, size, before)
    before = before + size
  end
end

local take = argument_reader(2)
for e = 1, tonumber(take()) do
  local id, is_forged = take(), false
  for _, range in ipairs(take_list(take)) do
    local entry, first, count = parse_range(range)
    local value = redis.pcall('HGET', KEYS[2], entry .. ':' .. first)
    is_forged = is_forged or value ~= waiting_in(count, id)
  end
  if is_forged then forged[#forged + 1] = e end
end

local is_pushed = true
for start = 1, #elements, 1000 do
  local pushed = redis.pcall('RPUSH', KEYS[1], unpack(elements, start, math.min(#elements, start + 999)))
  is_pushed = is_pushed and type(pushed) == 'number'
end
if not is_pushed then -- the key `order` has another type: do without the order
  for _, id in ipairs(ids) do redis.pcall('HDEL', KEYS[2], id) end
end
return { count_tickets(KEYS[1], KEYS[2]), unpack(forged) }
