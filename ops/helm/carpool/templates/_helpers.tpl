{{- /* Names. At most 32 characters, so that those with a part and a model fit into a label. */ -}}
{{- define "carpool.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 32 | trimSuffix "-" }}
{{- end }}

{{- define "carpool.fullname" -}}
{{- $name := include "carpool.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 32 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 32 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 32 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- /* A model's name as a part of names of objects. What is no DNS label, or too long, gets a hash, so that no two
models share one. */ -}}
{{- define "carpool.modelName" -}}
{{- if and (le (len .) 22) (regexMatch "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$" .) -}}
{{ . }}
{{- else -}}
{{ printf "%s-%s" (. | lower | replace "." "-" | replace "_" "-" | trunc 15 | trimSuffix "-") (sha256sum . | trunc 6) }}
{{- end -}}
{{- end }}

{{- define "carpool.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "carpool.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end }}

{{- /* The image of a part. Input: root, image (of the values), name. */ -}}
{{- define "carpool.image" -}}
{{- $image := .root.Values.image -}}
{{- if .image -}}
{{ .image }}
{{- else -}}
{{ with $image.registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .name }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end }}

{{- define "carpool.ofRelease" -}}
app.kubernetes.io/name: {{ include "carpool.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Labels by which a Deployment selects its pods, which cannot change later. Input: root, part, and optionally id:
a model as a part of names. */ -}}
{{- define "carpool.selector" -}}
{{ include "carpool.ofRelease" .root }}
app.kubernetes.io/component: {{ .part }}
{{- with .id }}
carpool/model: {{ . }}
{{- end }}
{{- end }}

{{- define "carpool.labels" -}}
{{ include "carpool.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* A value as text. Helm reads numbers as floats, and would write 1073741824 as 1.073741824e+09. */ -}}
{{- define "carpool.text" -}}
{{- if and (kindIs "float64" .) (eq (float64 (int64 .)) .) -}}
{{ int64 . }}
{{- else if or (kindIs "map" .) (kindIs "slice" .) -}}
{{ toJson . }}
{{- else -}}
{{ toString . }}
{{- end -}}
{{- end }}

{{- /* NAME=VALUE of each, as a JSON list: values may have several lines. */ -}}
{{- define "carpool.namedValues" -}}
{{- $lines := list -}}
{{- range $name, $value := . -}}
{{- $lines = append $lines (printf "%s=%s" $name (include "carpool.text" $value)) -}}
{{- end -}}
{{ toJson $lines }}
{{- end }}

{{- /* Settings of a service as variables. Input: root, settings. `merge` would take 0, false and "" for missing. */ -}}
{{- define "carpool.settings" -}}
{{- range $name, $value := mergeOverwrite (dict) .root.Values.settings .settings }}
- name: CARPOOL_{{ upper $name }}
  value: {{ include "carpool.text" $value | quote }}
{{- end }}
{{- end }}

{{- /* Variables with which every service finds Redis, and tells how it does. Input: root, role. */ -}}
{{- define "carpool.commonEnv" -}}
{{- $values := .root.Values -}}
{{- $redis := $values.redis -}}
- name: CARPOOL_REDIS_URL
{{- if $redis.keys.url }}
  valueFrom: {secretKeyRef: {name: {{ $redis.existingSecret }}, key: {{ $redis.keys.url }}}}
{{- else }}
  value: {{ $redis.url | quote }}
{{- end }}
- name: CARPOOL_PREFIX
  value: {{ $redis.prefix | quote }}
{{- if ne $redis.auth "none" }}
{{- $user := ternary .role $redis.user (eq $redis.auth "roles") }}
{{- with $user }}
- name: CARPOOL_REDIS_USER
  value: {{ . | quote }}
{{- end }}
- name: CARPOOL_REDIS_PASSWORD_FILE
  value: /run/carpool/redis/password
{{- end }}
{{- if $redis.tls.existingSecret }}
{{- range $name, $variable := dict "ca" "CA" "cert" "CERT" "key" "KEY" }}
{{- if index $redis.tls $name }}
- name: CARPOOL_REDIS_{{ $variable }}_FILE
  value: /run/carpool/redis-tls/{{ $name }}.pem
{{- end }}
{{- end }}
{{- end }}
- name: CARPOOL_HTTP_HOST
  value: {{ $values.listenAddress | quote }}
- name: CARPOOL_HTTP_PORT
  value: "9464"
{{- end }}

{{- /* Volumes of every pod. A pod has the password of its own role only. Input: root, role, section. */ -}}
{{- define "carpool.commonVolumes" -}}
{{- $redis := .root.Values.redis -}}
- name: tmp
  emptyDir: {sizeLimit: {{ .section.tmpSize | default "64Mi" }}}
{{- if ne $redis.auth "none" }}
- name: redis
  secret:
    secretName: {{ $redis.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ index $redis.keys (ternary .role "password" (eq $redis.auth "roles")) }}, path: password}]
{{- end }}
{{- with $redis.tls }}
{{- if .existingSecret }}
- name: redis-tls
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      {{- range $name := list "ca" "cert" "key" }}
      {{- with index $redis.tls $name }}
      - {key: {{ . }}, path: {{ $name }}.pem}
      {{- end }}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "carpool.commonMounts" -}}
{{- $redis := .root.Values.redis -}}
- {name: tmp, mountPath: /tmp}
{{- if ne $redis.auth "none" }}
- {name: redis, mountPath: /run/carpool/redis, readOnly: true}
{{- end }}
{{- if $redis.tls.existingSecret }}
- {name: redis-tls, mountPath: /run/carpool/redis-tls, readOnly: true}
{{- end }}
{{- end }}

{{- /* A Deployment. Input:

  root      the chart's top-level scope
  part      gateway, batcher, worker, node or console
  id        optional: the model, as a part of names
  section   its values
  image     the name of its image
  role      its role in Redis
  args      list: the command
  env       YAML: its own variables
  ports     YAML: its ports but that of health and metrics
  volumes   YAML; mounts: YAML
  resources dict
  grace     seconds after SIGTERM in which it ends
  start     seconds in which it starts
  preStop   seconds before SIGTERM
  scaled    whether something else sets the number of pods
  checksum  optional: a hash of the configuration
*/ -}}
{{- define "carpool.deployment" -}}
{{- $values := .root.Values -}}
{{- $section := .section -}}
{{- $name := printf "%s-%s" (include "carpool.fullname" .root) .part -}}
{{- with .id }}{{ $name = printf "%s-%s" $name . }}{{ end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "carpool.labels" . | nindent 4 }}
spec:
  {{- if not .scaled }}
  replicas: {{ ternary $section.replicas 1 (hasKey $section "replicas") | int }}
  {{- end }}
  revisionHistoryLimit: 3
  progressDeadlineSeconds: {{ add (int .start) (int .grace) 300 }}
  {{- with $section.strategy }}
  strategy: {{- toYaml . | nindent 4 }}
  {{- end }}
  selector:
    matchLabels: {{- include "carpool.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- /* Without the version: a new chart need not restart workers whose image stays. */}}
        {{- include "carpool.selector" . | nindent 8 }}
        {{- with mergeOverwrite (dict) $values.podLabels ($section.podLabels | default dict) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- $annotations := mergeOverwrite (dict) $values.podAnnotations ($section.podAnnotations | default dict) }}
      {{- with .checksum }}{{ $_ := set $annotations "checksum/files" . }}{{ end }}
      {{- with $annotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "carpool.serviceAccountName" .root }}
      automountServiceAccountToken: false
      # Else Services named carpool-... would set variables that are named like settings.
      enableServiceLinks: false
      {{- if has .part (list "worker" "node") }}
      shareProcessNamespace: true # reaps processes that a model starts and abandons
      {{- end }}
      terminationGracePeriodSeconds: {{ int .grace }}
      securityContext: {{- toYaml $values.podSecurityContext | nindent 8 }}
      {{- with $values.imagePullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- range $field := list "nodeSelector" "affinity" "tolerations" "runtimeClassName" "priorityClassName" }}
      {{- with index $section $field }}
      {{ $field }}: {{- if kindIs "string" . }} {{ . }}{{ else }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- end }}
      {{- end }}
      topologySpreadConstraints:
        {{- with $section.topologySpreadConstraints }}
        {{- toYaml . | nindent 8 }}
        {{- else }}
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "carpool.selector" . | nindent 14 }}
        {{- end }}
      containers:
        - name: {{ .part }}
          image: {{ include "carpool.image" (dict "root" .root "image" $section.image "name" .image) }}
          imagePullPolicy: {{ $values.image.pullPolicy }}
          args: {{- toYaml .args | nindent 12 }}
          env:
            {{- include "carpool.commonEnv" . | nindent 12 }}
            {{- with .env | trim }}{{ . | nindent 12 }}{{ end }}
            {{- with concat $values.extraEnv ($section.extraEnv | default list) }}{{ toYaml . | nindent 12 }}{{ end }}
          ports:
            {{- with .ports }}{{ . | nindent 12 }}{{ end }}
            - {name: metrics, containerPort: 9464}
          # /healthz fails only for what a restart mends: not without Redis, and not while a model loads.
          startupProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: {{ div (add (int .start) 4) 5 }}
          livenessProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 10
            timeoutSeconds: 10
            failureThreshold: 3
          readinessProbe:
            httpGet: {path: /readyz, port: metrics}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          {{- with .preStop }}
          lifecycle:
            preStop:
              exec: {command: [sleep, {{ int . | quote }}]}
          {{- end }}
          securityContext: {{- toYaml $values.securityContext | nindent 12 }}
          resources: {{- toYaml .resources | nindent 12 }}
          volumeMounts:
            {{- include "carpool.commonMounts" . | nindent 12 }}
            {{- with .mounts | trim }}{{ . | nindent 12 }}{{ end }}
            {{- with $section.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{ end }}
      volumes:
        {{- include "carpool.commonVolumes" . | nindent 8 }}
        {{- with .volumes | trim }}{{ . | nindent 8 }}{{ end }}
        {{- with $section.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
{{- end }}

{{- /* The resources of a container, with its GPUs. Input: a section. */ -}}
{{- define "carpool.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .gpuResource (int .gpus))) -}}
{{- end -}}
{{ toJson $resources }}
{{- end }}

{{- /* Input: root, part, id, most (the most pods that there are). */ -}}
{{- define "carpool.podDisruptionBudget" -}}
{{- if and .root.Values.podDisruptionBudget.enabled (gt (int .most) 1) }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "carpool.fullname" .root }}-{{ .part }}{{ with .id }}-{{ . }}{{ end }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "carpool.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "carpool.selector" . | nindent 6 }}
{{- end }}
{{- end }}
