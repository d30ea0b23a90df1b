{{/* A worker's pod. Takes root, component (compute or attention) and pool. */}}
{{- define "dovetail.workerArgs" -}}
{{- if eq .component "compute" -}}
- compute-worker
- {{ clean (printf "/models/%s" .root.Values.model.path) }}
- --device={{ ternary "cuda" "cpu" (eq .pool.device "gpu") }}
{{- else -}}
- attention-worker
- --device={{ ternary "cuda:0" "cpu" (eq .pool.device "gpu") }}
- --kv-capacity={{ if .pool.kvCapacityGiB }}{{ .pool.kvCapacityGiB }}GiB{{ else }}auto{{ end }}
{{- end }}
- --name=$(POD_NAME)
- --scheduler={{ include "dovetail.schedulerAddress" .root }}
- --threads=$(DOVETAIL_THREADS)
- --join-timeout=600
{{ include "dovetail.dataArgs" .root }}
{{- include "dovetail.securityArgs" .root }}
{{- range .pool.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "dovetail.probe" -}}
exec:
  command:
    - sh
    - -c
    - exec dovetail status --{{ .probe }} "$POD_NAME" {{ include "dovetail.operatorFlags" .root }}
{{- end -}}

{{- define "dovetail.workerResources" -}}
{{- $resources := deepCopy (default dict .pool.resources) -}}
{{- $limits := deepCopy (default dict $resources.limits) -}}
{{- $requests := deepCopy (default dict $resources.requests) -}}
{{- $extra := dict -}}
{{- if and (eq .pool.device "gpu") (eq .root.Values.gpu.mode "devicePlugin") -}}
{{- $_ := set $extra .root.Values.gpu.resourceName (toString (default 1 .pool.gpuCount)) -}}
{{- end -}}
{{- if .root.Values.rdma.enabled -}}
{{- $_ := set $extra .root.Values.rdma.resourceName (toString .root.Values.rdma.resourceCount) -}}
{{- end -}}
{{- with .pool.hugepages -}}
{{- $_ := set $extra (printf "hugepages-%s" .size) .amount -}}
{{- end -}}
{{- $out := dict "limits" (merge $extra $limits) "requests" (merge (deepCopy $extra) $requests) -}}
{{- if and (eq .pool.device "gpu") (eq .root.Values.gpu.mode "dra") -}}
{{- $_ := set $out "claims" (list (dict "name" "gpu")) -}}
{{- end -}}
{{ toYaml $out }}
{{- end -}}

{{- define "dovetail.modelVolume" -}}
- name: model
{{- if eq .Values.model.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.claimName }}
    readOnly: true
{{- else if eq .Values.model.source "image" }}
  image:
    reference: {{ required "model.image.reference: the image that holds the model" .Values.model.image.reference }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- else }}
  emptyDir:
    sizeLimit: {{ .Values.model.fetch.storage }}
{{- end }}
{{- end -}}

{{- define "dovetail.workerPod" -}}
{{- $root := .root -}}
{{- $compute := eq .component "compute" -}}
{{- $drain := int (include "dovetail.drainSeconds" $root) -}}
metadata:
  {{- include "dovetail.podMeta" . | nindent 2 }}
spec:
  {{- include "dovetail.podCommon" (dict "root" $root "component" .component "pool" .pool "settings" .pool) | nindent 2 }}
  terminationGracePeriodSeconds: {{ ternary 60 (add $drain 30) $compute }}
  {{- with $root.Values.gpu.runtimeClassName }}
  {{- if eq $.pool.device "gpu" }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- end }}
  {{- if and (eq .pool.device "gpu") (eq $root.Values.gpu.mode "dra") }}
  resourceClaims:
    - name: gpu
      resourceClaimTemplateName: {{ include "dovetail.fullname" $root }}-{{ .component }}-{{ .pool.name }}-gpu
  {{- end }}
  {{- if and $compute (eq $root.Values.model.source "fetch") }}
  initContainers:
    - name: fetch
      image: {{ required "model.fetch.image: the image that fetches the model" $root.Values.model.fetch.image }}
      command:
        {{- toYaml $root.Values.model.fetch.command | nindent 8 }}
      {{- with $root.Values.model.fetch.env }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext:
        {{- include "dovetail.containerSecurity" (dict "root" $root "rdma" false) | nindent 8 }}
      resources:
        requests: {cpu: "1", memory: 1Gi}
        limits: {cpu: "4", memory: 2Gi}
      volumeMounts:
        - name: model
          mountPath: /models
        - name: tmp
          mountPath: /tmp
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "dovetail.image" . }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [dovetail]
      args:
        {{- include "dovetail.workerArgs" . | nindent 8 }}
      env:
        {{- include "dovetail.env" . | nindent 8 }}
        - name: DOVETAIL_THREADS
          {{- if .pool.threads }}
          value: {{ .pool.threads | quote }}
          {{- else }}
          valueFrom:
            resourceFieldRef:
              containerName: {{ .component }}
              resource: limits.cpu
              divisor: "1"
          {{- end }}
        - name: HOME
          value: /tmp
        {{- with .pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $root.Values.rdma.enabled }}
      ports:
        - name: data
          containerPort: {{ $root.Values.network.dataPorts.first }}
      {{- end }}
      securityContext:
        {{- include "dovetail.containerSecurity" (dict "root" $root "rdma" true) | nindent 8 }}
      resources:
        {{- include "dovetail.workerResources" . | nindent 8 }}
      startupProbe:
        {{- include "dovetail.probe" (dict "root" $root "probe" (ternary "ready" "alive" $compute)) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 6
        failureThreshold: {{ max 1 (div (int (default 1800 .pool.startupSeconds)) 5) }}
      readinessProbe:
        {{- include "dovetail.probe" (dict "root" $root "probe" "ready") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 6
        failureThreshold: 3
      livenessProbe:
        {{- include "dovetail.probe" (dict "root" $root "probe" "alive") | nindent 8 }}
        periodSeconds: 20
        timeoutSeconds: 6
        failureThreshold: 15
      {{- if not $compute }}
      lifecycle:
        preStop:
          exec:
            command:
              - sh
              - -c
              - exec dovetail drain "$POD_NAME" --alone {{ include "dovetail.operatorFlags" $root }}
      {{- end }}
      volumeMounts:
        {{- include "dovetail.secretMounts" (dict "root" $root "operator" true) | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
        {{- if $compute }}
        - name: model
          mountPath: /models
          readOnly: true
        {{- end }}
        {{- if .pool.hugepages }}
        - name: hugepages
          mountPath: /dev/hugepages
        {{- end }}
  volumes:
    {{- include "dovetail.secretVolumes" (dict "root" $root "role" .component "operator" true) | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ default "1Gi" .pool.sharedMemory }}
    {{- if $compute }}
    {{- include "dovetail.modelVolume" $root | nindent 4 }}
    {{- end }}
    {{- with .pool.hugepages }}
    - name: hugepages
      emptyDir:
        medium: HugePages-{{ .size }}
    {{- end }}
{{- end -}}

{{/* A Deployment for each pool that is not part of groups. Takes root and component. */}}
{{- define "dovetail.workerDeployments" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- $lws := $root.Values.leaderWorkerSet -}}
{{- $grouped := ternary (get $lws (printf "%sPool" $component)) "" $lws.enabled -}}
{{- range $pool := (get $root.Values $component).pools }}
{{- if and (eq $component "attention") (eq $pool.device "cpu") (not $pool.kvCapacityGiB) }}
{{- fail (printf "attention pool %s: a CPU pool needs kvCapacityGiB, within the memory limit of its pods" $pool.name) }}
{{- end }}
{{- if ne $pool.name $grouped }}
{{- $one := dict "root" $root "component" $component "pool" $pool }}
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "dovetail.fullname" $root }}-{{ $component }}-{{ $pool.name }}
  labels:
    {{- include "dovetail.labels" $one | nindent 4 }}
spec:
  {{- if eq $root.Values.autoscaling.mode "none" }}
  replicas: {{ $pool.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  {{- if eq $component "attention" }}
  minReadySeconds: {{ include "dovetail.moveSeconds" $root }}
  {{- end }}
  progressDeadlineSeconds: {{ add (int (default 1800 $pool.startupSeconds)) 600 }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      maxSurge: {{ dig "strategy" "maxSurge" 1 $pool }}
      maxUnavailable: {{ dig "strategy" "maxUnavailable" 0 $pool }}
  selector:
    matchLabels:
      {{- include "dovetail.selector" $one | nindent 6 }}
  template:
    {{- include "dovetail.workerPod" $one | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}
