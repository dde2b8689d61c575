-- load: a version of a model with these parameters is wanted. If it is already, its generation goes on, perhaps with
-- other replicas or another share; else it is a new one. Without a share it replaces all others of the model, which
-- leave once it serves in full; if it is what serves already, one that has a share stays beside it.
--
-- KEYS  1 wanted  2 seats  3 outcomes  4 generation  5 audit
-- ARGV  1 model   2 entry  3 version   4 parameters  5 replicas, empty: as many as before, or as declared
--       6 share, empty: all of the traffic           7 how many outcomes are kept  8 settings
--       9 replicas that the entry declares          10 who 11 by which way  12 maximum length of the audit
-- Returns the generation; or a sentence that says why it cannot be. O(replicas of the model).
-- GRANT admin,console,control outcomes hdel
-- GRANT admin,console,control generation incr
local model, entry, version, parameters = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local replicas, share, settings = tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[8]
local generations = generations_of(KEYS[1], model)

local found, main
for _, generation in ipairs(generations) do
  local is_same = generation.entry == entry and generation.version == version and generation.parameters == parameters
    and (generation.settings or '{}') == settings
  if is_same and (generation.settled or not generation.leaving) then found = generation end
  if not generation.share and (generation.settled or not generation.leaving) then main = generation end
end
if share and (not main or main.version == version) then
  return main and 'this version serves the model: only another one can have a share of the traffic'
    or 'nothing serves the rest of the traffic: load a version without a share first'
end

local replicas_before, share_before = found and found.replicas, found and found.share
local is_changed = not found or found.leaving
if found then
  if replicas then
    found.replicas = replicas
  elseif found.share and not share then
    found.replicas = math.max(found.replicas, main and main.replicas or 1)
  end
  local takes_over = not share and (found.share or found.leaving)
  found.share = share
  if takes_over then
    stay(KEYS[2], found)
  end
else
  found = {
    generation = redis.call('INCR', KEYS[4]), entry = entry, version = version, parameters = parameters,
    replicas = replicas or (not share and (main and main.replicas or tonumber(ARGV[9]))) or 1,
    share = share, settings = settings,
  }
  redis.call('HDEL', KEYS[3], found.generation - tonumber(ARGV[7]))
  generations[#generations + 1] = found
end
local reason = string.format('GONE generation %d (version %s) was loaded instead', found.generation, version)
if share then
  for at = #generations, 1, -1 do -- one has a share at a time
    if generations[at].share and generations[at] ~= found then
      remove(KEYS[2], KEYS[3], generations, at, reason)
    end
  end
elseif found ~= main then
  leave(KEYS[2], KEYS[3], generations, found, reason)
end
write_generations(KEYS[1], model, generations)
if is_changed or found.replicas ~= replicas_before or found.share ~= share_before then
  local details = {
    model = model, version = version, entry = entry, generation = tostring(found.generation),
    replicas = tostring(found.replicas), share = found.share and found.share .. '%' or 'all',
  }
  if replicas_before and replicas_before ~= found.replicas then
    details.replicas = of_change(tostring(replicas_before), details.replicas)
  end
  if share_before ~= found.share and replicas_before then
    details.share = of_change(share_before and share_before .. '%' or 'all', details.share)
  end
  write_audit(KEYS[5], { ARGV[10], ARGV[11], ARGV[12] }, 'load', details)
end
return found.generation
