-- release: deliver withheld results that an earlier script left over, and free lost tickets at the front of the
-- order. A ticket is lost if its request's entry was deleted by XDEL, or its batch by hand: no result will ever come,
-- and the results behind it would be withheld for ever.
--
-- KEYS  1 order   2 held; to free lost tickets also 3 requests   4 batches
-- Returns { 'MORE' }  there is more to do: run it again
--       | { 'EMPTY' } no tickets are left
--       | { 'WAITING', entry ID } | { 'IN_FLIGHT', batch ID } | { 'UNKNOWN', '' }  state of the first ticket
-- O(results delivered + tickets freed), and O(bytes) of the results; with KEYS 3 and 4 also O(bytes) of the entry or
-- batch of the first ticket: pass these keys only rarely.
redis.pcall('HDEL', KEYS[2], '') -- must be the first write: see deliver.lua
if release(KEYS[1], KEYS[2]) then return { 'MORE' } end

local function is_lost(state, id)
  if state == 'WAITING' then return #redis.call('XRANGE', KEYS[3], id, id) == 0 end
  if state == 'IN_FLIGHT' then return #redis.call('XRANGE', KEYS[4], id, id) == 0 end
  return true
end

for _ = 1, 1000 do
  local ticket = redis.pcall('LINDEX', KEYS[1], 0)
  if type(ticket) ~= 'string' then return { 'EMPTY' } end
  local state, id = parse_ticket(redis.pcall('HGET', KEYS[2], ticket))
  if state == 'WITHHELD' then return { 'MORE' } end
  if not KEYS[3] or not is_lost(state, id) then return { state, id } end
  redis.call('LPOP', KEYS[1])
  redis.pcall('HDEL', KEYS[2], ticket)
end
return { 'MORE' }
