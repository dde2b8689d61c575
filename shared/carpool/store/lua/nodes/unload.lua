-- unload: a model, or one version of it, is wanted no more. If that replaced another version, the other one stays.
--
-- KEYS  1 wanted  2 seats  3 outcomes  4 audit
-- ARGV  1 model   2 version, empty for all  3 who  4 by which way  5 maximum length of the audit
-- Returns the number of generations that were wanted. O(replicas of the model).
local generations = generations_of(KEYS[1], ARGV[1])
local before = #generations
local versions = {}
for at = before, 1, -1 do
  if ARGV[2] == '' or generations[at].version == ARGV[2] then
    versions[#versions + 1] = tostring(generations[at].version)
    remove(KEYS[2], KEYS[3], generations, at, 'GONE it was unloaded')
  end
end
local removed = before - #generations
restore(KEYS[2], KEYS[3], generations)
write_generations(KEYS[1], ARGV[1], generations)
if removed > 0 then
  write_audit(KEYS[4], { ARGV[3], ARGV[4], ARGV[5] }, 'unload', {
    model = ARGV[1], versions = table.concat(versions, ' '), generations = tostring(removed),
  })
end
return removed
