{{/*
One stage's pod, for every kind of set. Takes root, component (its label) and index: the label of the pod that holds the
stage's index, or nothing for a standby, which takes the index of a stage that is lost.
*/}}
{{- define "baton.stagePod" -}}
{{- $root := .root -}}
{{- $stages := $root.Values.stages -}}
metadata:
  labels:
    {{- include "baton.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with $stages.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "baton.pod" $root | nindent 2 }}
  {{- with $stages.gpu.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ $stages.terminationGracePeriod }}
  containers:
    - name: stage
      image: {{ include "baton.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - stage
        - --coordinator=http://{{ include "baton.fullname" $root }}-coordinator:9000
        - --model={{ $root.Values.model.path }}
        - --listen=0.0.0.0:7000
        - --link-listen=0.0.0.0:7001
        - --metrics=0.0.0.0:7002
        # The pod's address: a name of a pod that has just started is not in every DNS cache yet.
        - --advertise=$(POD_IP)
        {{- if .index }}
        - --index=$(STAGE_INDEX)
        {{- else }}
        - --standby
        {{- end }}
        - --backend={{ $stages.backend }}
        {{- if $stages.threads }}
        - --threads={{ int $stages.threads }}
        {{- end }}
        {{- with $stages.memoryBytes }}
        - --memory={{ . }}
        {{- end }}
        {{- include "baton.telemetryArgs" $root | nindent 8 }}
        {{- range $stages.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- with .index }}
        - name: STAGE_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ . }}']"}}
        {{- end }}
        {{- range $name, $value := $stages.nccl }}
        - name: {{ $name }}
          value: {{ $value | quote }}
        {{- end }}
        {{- with $stages.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: grpc, containerPort: 7000}
        - {name: link, containerPort: 7001}
        - {name: metrics, containerPort: 7002}
      {{- /* The empty service name stands for the process, baton.v1.Stage for its place in the pipeline. */}}
      startupProbe:
        grpc: {port: 7000}
        periodSeconds: 5
        failureThreshold: {{ max 1 (div (add (int $stages.startupTimeout) 4) 5) }}
      livenessProbe:
        grpc: {port: 7000}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      {{- /* A standby has no place in the pipeline; it is ready when it can take one. */}}
      readinessProbe:
        grpc: {port: 7000{{ if .index }}, service: baton.v1.Stage{{ end }}}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      lifecycle:
        preStop: {sleep: {seconds: {{ $stages.preStopSleep }}}}
      securityContext:
        {{- include "baton.containerSecurity" $root | nindent 8 }}
        capabilities:
          drop: [ALL]
          {{- if $stages.rdma.enabled }}
          add: [IPC_LOCK]
          {{- end }}
      resources:
        {{- $device := dict }}
        {{- if $stages.gpu.count }}
        {{- $_ := set $device $stages.gpu.resourceName (toString $stages.gpu.count) }}
        {{- end }}
        {{- if $stages.rdma.enabled }}
        {{- $_ := set $device $stages.rdma.resourceName (toString $stages.rdma.count) }}
        {{- end }}
        {{- $resources := dict "requests" (merge (dict) $device $stages.resources.requests) "limits" (merge (dict) $device $stages.resources.limits) }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- with include "baton.modelMount" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $stages.shmSize }}}
    - name: tmp
      emptyDir: {}
    {{- with include "baton.modelVolume" $root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with $stages.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $stages.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $stages.affinity }}
  affinity:
    {{- tpl (toYaml .) $root | nindent 4 }}
  {{- end }}
  {{- with $stages.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- tpl (toYaml .) $root | nindent 4 }}
  {{- end }}
{{- end -}}
