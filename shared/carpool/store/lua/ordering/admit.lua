-- admit: put the tickets of entries at the end of the order, before any of their requests may be refused; `dispatch`
-- does the same for those that it finds waiting.
--
-- An entry that was put back names the tickets that its requests have. Any producer can write such an entry, so they
-- count only if `tickets` has them in this entry.
--
-- KEYS  1 order   2 tickets
-- ARGV  1 entries with tickets of their own: ID SIZE ID SIZE ...
--       2.. list of entries that say that ranges were put back in them: ID; list of these ranges
-- Returns { the number of tickets in the order, indexes in that list of the entries whose ranges are not theirs ... }
-- O(entries + ranges).
-- GRANT batcher tickets hget hdel
redis.pcall('HDEL', KEYS[2], '') -- must be the first write: see deliver.lua
enter_order(KEYS[1], KEYS[2], ARGV[1])
local forged = {}
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
return { count_tickets(KEYS[1], KEYS[2]), unpack(forged) }
